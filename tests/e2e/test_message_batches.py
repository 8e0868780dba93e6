"""Message batches with the anthropic SDK, and the isolation of files and batches in both dialects."""

from __future__ import annotations

import json

import anthropic
import httpx2
import openai
import psutil
import pytest

from tests.support.e2e.batches import entry, finished, line, upload
from tests.support.e2e.keys import make_key
from tests.support.stack import Stack, eventually


@pytest.fixture
def client(stack: Stack) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0)


def test_a_message_batch_with_anthropics_sdk(stack: Stack, client: anthropic.Anthropic) -> None:
    wrong = [
        entry("no-model", model="unknown"),
        entry("no-tokens", max_tokens=0),
        entry("streamed", stream=True),
    ]
    batch = client.messages.batches.create(requests=[*(entry(f"n{n}") for n in range(8)), *wrong])
    assert batch.type == "message_batch"
    assert batch.processing_status == "in_progress"
    assert (batch.request_counts.processing, batch.results_url, batch.ended_at) == (11, None, None)
    assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
    eventually(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    batch = client.messages.batches.retrieve(batch.id)
    assert batch.request_counts.to_dict() == {
        "processing": 0,
        "succeeded": 8,
        "errored": 3,
        "canceled": 0,
        "expired": 0,
    }
    found = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    assert set(found) == {*(f"n{n}" for n in range(8)), "no-model", "no-tokens", "streamed"}
    one = found["n0"]
    assert one.type == "succeeded"
    assert (one.message.type, one.message.role, one.message.usage.output_tokens <= 3) == ("message", "assistant", True)
    errors = {name: found[name].error.error.type for name in ("no-model", "no-tokens", "streamed")}  # type: ignore[union-attr]
    assert errors == {
        "no-model": "not_found_error",
        "no-tokens": "invalid_request_error",
        "streamed": "invalid_request_error",
    }
    assert batch.id in [each.id for each in client.messages.batches.list(limit=3)]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_lists_are_paged_in_both_directions(client: anthropic.Anthropic) -> None:
    made = [client.messages.batches.create(requests=[entry("a")]).id for _ in range(4)]
    newest = client.messages.batches.list(limit=4)
    assert [each.id for each in newest.data] == made[::-1]
    after = client.messages.batches.list(limit=2, after_id=made[3])
    assert [each.id for each in after.data] == [made[2], made[1]]
    assert after.has_more
    before = client.messages.batches.list(limit=2, before_id=made[0])
    assert [each.id for each in before.data] == [made[2], made[1]]
    assert before.has_more


def test_a_message_batch_is_cancelled(client: anthropic.Anthropic) -> None:
    batch = client.messages.batches.create(requests=[entry(f"n{n}", max_tokens=300) for n in range(60)])
    batch = client.messages.batches.cancel(batch.id)
    assert batch.processing_status in ("canceling", "ended")
    assert batch.cancel_initiated_at
    with pytest.raises(anthropic.ConflictError):
        client.messages.batches.delete(batch.id)
    eventually(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"requests": []}',
        b'{"requests": [{"custom_id": "a"}]}',
        b'{"requests": [{"custom_id": "a b", "params": {}}]}',
        b'{"requests": [{"custom_id": "a", "params": 1}]}',
        b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}',
        b'{"requests": [{"custom_id": "a", "params": {}}], "more": 1}',
    ],
)
def test_invalid_message_batches_are_rejected(stack: Stack, body: bytes) -> None:
    response = httpx2.post(f"{stack.url}/v1/messages/batches", content=body, headers=stack.headers, timeout=60)
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_idempotency_key_creates_one_batch(stack: Stack) -> None:
    body, headers = {"requests": [entry("a")]}, {**stack.headers, "idempotency-key": "one-batch"}
    first, again = (httpx2.post(f"{stack.url}/v1/messages/batches", json=body, headers=headers) for _ in range(2))
    assert (first.status_code, again.json()) == (200, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    other = httpx2.post(f"{stack.url}/v1/messages/batches", json={"requests": [entry("b")]}, headers=headers)
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict_error")


def test_other_tenants_cannot_read_files_and_batches(stack: Stack, client: anthropic.Anthropic, neighbor: str) -> None:
    mine = stack.client()
    file = upload(mine, [line("a")])
    batch = mine.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h")
    batch = finished(mine, batch.id)
    messages = client.messages.batches.create(requests=[entry("a")]).id
    request = httpx2.get(f"{stack.url}/v1/files/{batch.output_file_id}/content", headers=stack.headers)
    request_id = json.loads(request.text)["response"]["request_id"]
    theirs = {"authorization": f"Bearer {neighbor}"}
    assert httpx2.get(f"{stack.url}/v1/models", headers=theirs).status_code == 200
    for method, path in (
        ("GET", f"files/{file}"),
        ("DELETE", f"files/{file}"),
        ("GET", f"files/{file}/content"),
        ("GET", f"files/{batch.output_file_id}/content"),
        ("GET", f"files?after={file}"),
        ("GET", f"batches/{batch.id}"),
        ("POST", f"batches/{batch.id}/cancel"),
        ("GET", f"batches?after={batch.id}"),
        ("GET", f"messages/batches/{messages}"),
        ("GET", f"messages/batches/{messages}/results"),
        ("POST", f"messages/batches/{messages}/cancel"),
        ("DELETE", f"messages/batches/{messages}"),
        ("GET", f"messages/batches?after_id={messages}"),
    ):
        assert httpx2.request(method, f"{stack.url}/v1/{path}", headers=theirs).status_code == 404, path
    made = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert httpx2.post(f"{stack.url}/v1/batches", json=made, headers=theirs).status_code == 404
    reported = {"json": {"success": True}, "headers": theirs}
    assert httpx2.post(f"{stack.url}/v1/requests/{request_id}/feedback", **reported).status_code == 404  # type: ignore[arg-type]
    for path in ("files", "batches", "messages/batches"):
        assert httpx2.get(f"{stack.url}/v1/{path}", headers=theirs).json()["data"] == []


def test_a_batch_waits_for_its_keys_limits_and_ends_if_the_key_is_revoked(stack: Stack) -> None:
    secret = make_key(stack, "of a batch", {"requests_per_minute": 30, "concurrency": 2}, scopes=["inference"])
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=secret, max_retries=0)
    batch = client.batches.create(
        input_file_id=upload(client, [line(f"n{n}") for n in range(45)]),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
    assert client.batches.retrieve(batch.id).request_counts.failed == 0  # rejected lines wait
    keys = httpx2.get(f"{stack.url}/api/keys", headers=stack.headers).json()["results"]
    (key,) = (each["id"] for each in keys if each["name"] == "of a batch")
    assert httpx2.delete(f"{stack.url}/api/keys/{key}", headers=stack.headers).status_code < 300
    mine = stack.client()
    batch = finished(mine, batch.id)
    assert batch.request_counts.completed + batch.request_counts.failed == 45
    failed = [json.loads(each) for each in mine.files.content(batch.error_file_id).text.splitlines()]
    assert {each["response"]["status_code"] for each in failed} == {401}


def test_an_upload_is_written_to_disk_and_not_kept_in_memory(stack: Stack) -> None:
    size = 120_000_000
    gateway = psutil.Process(stack.gateway())
    before = gateway.memory_info().rss
    client, most = stack.client(timeout=120), before
    part = json.dumps(line("a", user="x" * 4000)).encode() + b"\n"
    text = part * (size // len(part))
    file = client.files.create(file=("large.jsonl", text), purpose="batch")
    assert file.bytes == len(text)
    most = max(most, gateway.memory_info().rss)
    with client.files.with_streaming_response.content(file.id) as response:
        assert sum(len(chunk) for chunk in response.iter_bytes()) == file.bytes
    most = max(most, gateway.memory_info().rss)
    assert most - before < size / 3
    client.files.delete(file.id)
    assert not list((stack.data_dir / "files").glob("*.part"))
