"""Files and batches with both SDKs, on the running platform."""

from __future__ import annotations

import http.client
import io
import json
from typing import Any

import httpx2
import openai
import pytest

from tests.support.e2e.batches import finished, line, results, upload
from tests.support.stack import MODEL, Stack, eventually


def test_a_batch_with_openais_sdk(stack: Stack) -> None:
    client = stack.client()
    wrong = [line("too-long", max_tokens=10**6), line("no-model", model="unknown"), line("streamed", stream=True)]
    input_file = upload(client, [*(line(f"n{n}") for n in range(12)), *wrong])
    batch = client.batches.create(
        input_file_id=input_file, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "tests"}
    )
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"for": "tests"})
    assert batch.expires_at == pytest.approx(batch.created_at + 24 * 3600, abs=2)
    batch = finished(client, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (15, 12, 3)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at

    answered = results(client, batch.output_file_id)
    assert set(answered) == {f"n{n}" for n in range(12)}
    usages = [line["response"]["body"]["usage"] for line in answered.values()]
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    one = answered["n0"]
    assert one["error"] is None
    assert one["response"]["status_code"] == 200
    assert one["response"]["body"]["object"] == "chat.completion"
    assert one["response"]["body"]["usage"]["completion_tokens"] <= 3
    event = stack.event(one["response"]["request_id"])
    assert (event["outcome"], event["output"]) == ("completed", one["response"]["body"]["usage"]["completion_tokens"])

    failed = results(client, batch.error_file_id)
    status = {
        name: (each["response"]["status_code"], each["response"]["body"]["error"]["code"])
        for name, each in failed.items()
    }
    assert status == {
        "too-long": (400, "invalid_value"),
        "no-model": (404, "model_not_found"),
        "streamed": (400, "invalid_value"),
    }
    assert batch.id in [each.id for each in client.batches.list(limit=5)]
    assert {input_file, batch.output_file_id} <= {each.id for each in client.files.list()}
    assert client.files.delete(input_file).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(input_file)


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": ["Hello", "Bye"], "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}, "response"),
    ],
)
def test_a_batch_of_another_endpoint(stack: Stack, url: str, body: dict[str, Any], kind: str) -> None:
    client = stack.client()
    asked = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": MODEL, **body}}
    made = client.batches.create(input_file_id=upload(client, [asked]), endpoint=url, completion_window="24h")  # type: ignore[arg-type]
    batch = finished(client, made.id)
    response = results(client, batch.output_file_id)["a"]["response"]
    assert (response["status_code"], response["body"]["object"]) == (200, kind)


def test_an_invalid_file_fails_the_batch_with_an_error_per_line(stack: Stack) -> None:
    client = stack.client()
    text = b'{"custom_id": 1}\nno json\n' + json.dumps(line("a")).encode() + b"\n" + json.dumps(line("a")).encode()
    file = client.files.create(file=("lines.jsonl", io.BytesIO(text)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = finished(client, batch.id)
    assert batch.status == "failed"
    assert batch.failed_at and not batch.output_file_id
    assert [(each.code, each.line) for each in batch.errors.data] == [
        ("invalid_request", 1),
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 4),
    ]


def test_a_cancelled_batch_has_a_result_for_every_line(stack: Stack) -> None:
    client = stack.client()
    lines = [line(f"n{n}", max_tokens=30, ignore_eos=True) for n in range(1000)]  # more than end before it is canceled
    batch = client.batches.create(
        input_file_id=upload(client, lines), endpoint="/v1/chat/completions", completion_window="24h"
    )
    eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = finished(client, batch.id, 240)  # other requests have priority over those that have begun
    assert batch.status == "cancelled"
    answered, failed = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert not set(answered) & set(failed)
    assert set(answered) | set(failed) == {f"n{n}" for n in range(1000)}
    assert {each["error"]["code"] for each in failed.values()} == {"batch_cancelled"}
    assert batch.request_counts.completed == len(answered)
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_unknown")


def test_invalid_files_and_batches_are_rejected(stack: Stack) -> None:
    client = stack.client()
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.files.create(file=("x", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="lines"):
        client.files.create(file=("x", b"\n" * 50_001), purpose="batch")
    with pytest.raises(openai.NotFoundError) as exc_info:
        client.batches.create(input_file_id="file-unknown", endpoint="/v1/completions", completion_window="24h")
    assert exc_info.value.param == "input_file_id"
    file = upload(client, [line("a")])
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id=file, endpoint="/v1/moderations", completion_window="24h")
    with pytest.raises(openai.BadRequestError):
        client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="48h")  # type: ignore[arg-type]
    for path in ("/v1/files?limit=0", "/v1/files?unknown=1", "/v1/batches?after=x", "/v1/files/%00", "/v1/batches/%00"):
        assert 400 <= httpx2.get(stack.url + path, headers=stack.headers).status_code < 500, path
    assert httpx2.post(f"{stack.url}/v1/files", content=b"x" * 100_000).status_code == 401
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    connection.request("POST", "/v1/files", body=iter([b"x"]), headers={**stack.headers, "content-length": "300000000"})
    answer = connection.getresponse()  # before the rest is sent
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "request_too_large")
    connection.close()
