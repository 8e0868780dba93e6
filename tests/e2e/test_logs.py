"""Logs of gateway, worker and settler: they contain a request's IDs, and no text of prompts or outputs."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.support.stack import EMBEDDING_MODEL, MODEL, Stack, eventually

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "zanzibarquux"
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": f"Say {SECRET}"}], "max_tokens": 8},
    "completions": {"model": MODEL, "prompt": f"{SECRET} {SECRET}", "max_tokens": 8, "echo": True, "stream": True},
    "embeddings": {"model": EMBEDDING_MODEL, "input": [SECRET]},
}


def lines(stack: Stack, process: str, request_id: str) -> list[dict[str, Any]]:
    """Return the lines of a process's log that name the request. A list of executions counts as one line for each."""
    found = []
    for text in (stack.data_dir / "logs" / f"{process}.log").read_text().splitlines():
        if request_id in text:
            line = json.loads(text)
            found += [{**line, **execution} for execution in line.pop("executions", [{}])]
    return [line for line in found if line.get("request_id") == request_id]


def send(stack: Stack, endpoint: str, body: dict[str, Any]) -> httpx2.Response:
    headers = {**stack.headers, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    return httpx2.post(f"{stack.url}/v1/{endpoint}", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("endpoint", BODIES)
def test_logs_of_all_processes_name_the_request(stack: Stack, endpoint: str) -> None:
    body = BODIES[endpoint]
    answer = send(stack, endpoint, body)
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-request-id"]
    stack.event(request_id)
    processes = ("gateway", f"worker-{body['model']}", "settler")
    for process in processes:
        eventually(lambda process=process: lines(stack, process, request_id))  # type: ignore[misc]
    reported = {process: lines(stack, process, request_id) for process in processes}
    assert [line["event"] for line in reported[processes[1]]] == ["execution_claimed", "execution_finished"]
    assert [line["event"] for line in reported["settler"]] == ["usage_settled"]
    (line,) = reported["gateway"]
    assert (line["event"], line["status"], line["model"]) == ("request", "200", body["model"])
    every = [line for process in processes for line in reported[process]]
    assert {line["trace_id"] for line in every} == {TRACE}
    assert len({(line["tenant_id"], line["key_id"]) for line in every}) == 1


def test_logs_of_all_processes_name_a_batchs_request(stack: Stack) -> None:
    client = stack.client()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": BODIES["embeddings"]}
    file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    response = json.loads(client.files.content(output).text)["response"]
    assert len(response["body"]["data"][0]["embedding"]) == 384
    eventually(lambda: lines(stack, "settler", response["request_id"]))
    reported = lines(stack, f"worker-{EMBEDDING_MODEL}", response["request_id"])
    (settled,) = lines(stack, "settler", response["request_id"])
    assert len(settled["trace_id"]) == 32
    assert {line["trace_id"] for line in reported} == {settled["trace_id"]}


def test_logs_contain_no_text_of_prompts_or_outputs(stack: Stack) -> None:
    for endpoint, body in BODIES.items():
        send(stack, endpoint, body)
        send(stack, endpoint, {**body, "temperature": SECRET})
        send(stack, endpoint, {**body, SECRET: 1, "model": SECRET})
        send(stack, f"{endpoint}?{SECRET}", {**body, "messages": SECRET, "input": {SECRET: SECRET}})
    wrong = httpx2.post(f"{stack.url}/v1/embeddings", json={}, headers={"authorization": f"Bearer {SECRET}"})
    assert wrong.status_code == 401
    eventually(lambda: lines(stack, "gateway", wrong.headers["x-request-id"]))
    logs = list((stack.data_dir / "logs").glob("*.log"))
    assert len(logs) > 5
    for log in logs:
        text = log.read_text(errors="replace")
        assert SECRET not in text, log
        assert stack.key not in text, log


def test_health_checks_are_not_logged(stack: Stack) -> None:
    response = httpx2.get(f"{stack.url}/readyz")
    assert lines(stack, "gateway", response.headers["x-request-id"]) == []
