"""Request records of the running platform, from the gateway to the management API."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.support.e2e.websocket import socket
from tests.support.stack import MODEL, Stack, eventually

BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 3}


def post(stack: Stack, body: dict[str, Any], path: str = "completions", **headers: str) -> httpx2.Response:
    return httpx2.post(f"{stack.url}/v1/{path}", json=body, headers={**stack.headers, **headers}, timeout=60)


def get(stack: Stack, path: str, **query: str) -> dict[str, Any]:
    response = httpx2.get(f"{stack.url}/api/{path}", params=query, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def story(stack: Stack, request_id: str, *, executions: int) -> dict[str, Any]:
    """Return the request's record once it is written and this number of executions is settled."""
    url = f"{stack.url}/api/requests/{request_id}"

    def is_complete() -> bool:
        response = httpx2.get(url, headers=stack.headers, timeout=60)
        found = response.json()
        return response.status_code == 200 and found["record"] is not None and len(found["executions"]) >= executions

    eventually(is_complete)
    return get(stack, f"requests/{request_id}")


def test_a_record_contains_limits_routing_and_cost(stack: Stack) -> None:
    answer = post(stack, BODY)
    found = story(stack, answer.headers["x-request-id"], executions=1)
    record, (execution,) = found["record"], found["executions"]
    assert (record["endpoint"], record["requested_model"], record["served_model"]) == ("completions", MODEL, MODEL)
    assert (record["status"], record["outcome"], record["code"]) == ("200", "completed", "")
    assert 0 < record["ttft_ms"] <= record["total_ms"]
    assert record["max_tokens"] == 3
    (placed,) = record["placements"]
    assert placed["replica"] == execution["replica"]
    assert found["reserved_nano"] == record["reserved_nano"] == execution["reserved_nano"] > 0
    assert found["usd"] == answer.headers["x-millrace-cost-usd"]
    assert execution["output"] == answer.json()["usage"]["completion_tokens"]
    assert found["content"] is None
    listed = get(stack, "requests", limit="50")["results"]
    (row,) = [row for row in listed if row["request_id"] == found["request_id"]]
    assert row["usage"]["usd"] == found["usd"]


def test_records_of_a_completed_and_a_cancelled_stream(stack: Stack) -> None:
    whole = post(stack, {**BODY, "stream": True})
    assert story(stack, whole.headers["x-request-id"], executions=1)["record"]["stream"] is True
    asked = {**BODY, "stream": True, "max_tokens": 500, "ignore_eos": True}
    url = f"{stack.url}/v1/completions"
    with httpx2.stream("POST", url, json=asked, headers=stack.headers, timeout=60) as left:
        next(left.iter_lines())
    record = story(stack, left.headers["x-request-id"], executions=0)["record"]
    assert (record["status"], record["outcome"]) == ("200", "cancelled")


def test_records_of_websocket_requests(stack: Stack) -> None:
    with socket(stack, additional_headers=stack.headers) as client:
        assert client.receive() == {"type": "ready"}
        client.submit("a", max_tokens=2)
        messages = client.receive_all("a")
        client.submit("b", max_tokens=2000, ignore_eos=True)
        while client.receive()["type"] != "chunk":
            pass
        client.send_message(type="cancel", id="b")
        client.receive_all("b")
    record = story(stack, messages[0]["request_id"], executions=1)["record"]
    assert (record["endpoint"], record["outcome"], record["stream"]) == ("realtime.chat", "completed", True)
    eventually(lambda: get(stack, "requests", endpoint="realtime.chat", outcome="cancelled")["results"])
    rows = get(stack, "requests", endpoint="realtime.chat", outcome="cancelled")["results"]
    assert (rows[0]["status"], rows[0]["code"]) == ("499", "cancelled")


def test_the_record_of_a_rejection_names_the_limit(stack: Stack) -> None:
    made = httpx2.post(
        f"{stack.url}/api/limits",
        json={"model": "no-such-model", "requests_per_minute": 1},
        headers=stack.headers,
        timeout=60,
    ).json()
    try:
        assert post(stack, {**BODY, "model": "no-such-model"}).status_code == 404
        wrong = post(stack, {**BODY, "max_tokens": -1})
        record = story(stack, wrong.headers["x-request-id"], executions=0)["record"]
        assert (record["status"], record["outcome"], record["requested_model"]) == ("400", "refused", "")
    finally:
        httpx2.delete(f"{stack.url}/api/limits/{made['id']}", headers=stack.headers, timeout=60)
    made = httpx2.post(
        f"{stack.url}/api/limits", json={"model": MODEL, "requests_per_day": 0}, headers=stack.headers, timeout=60
    ).json()
    try:
        eventually(lambda: post(stack, BODY).status_code == 429)
        limited = post(stack, BODY)
        record = story(stack, limited.headers["x-request-id"], executions=0)["record"]
        assert (record["status"], record["outcome"], record["code"]) == ("429", "limited", "rate_limit_exceeded")
        assert (record["limited_by"]["id"], record["limited_by"]["name"]) == (made["id"], "requests_per_day")
        bounds = get(stack, "requests/rates")["bounds"]
        assert [bound["requests"] > 0 for bound in bounds if bound["id"] == made["id"]] == [True]
    finally:
        httpx2.delete(f"{stack.url}/api/limits/{made['id']}", headers=stack.headers, timeout=60)
        eventually(lambda: post(stack, BODY).status_code == 200)


def test_a_replayed_response_names_the_first_request(stack: Stack) -> None:
    first = post(stack, BODY, **{"Idempotency-Key": "records-1"})
    again = post(stack, BODY, **{"Idempotency-Key": "records-1"})
    assert again.headers["idempotent-replayed"] == "true"
    name = first.headers["x-request-id"]
    story(stack, name, executions=1)
    eventually(lambda: get(stack, f"requests/{name}")["others"])
    (replay,) = get(stack, f"requests/{name}")["others"]
    assert (replay["replay_of"], replay["outcome"]) == (name, "completed")


@pytest.fixture
def retention(stack: Stack) -> Any:
    def set_retention(days: int) -> None:
        response = httpx2.patch(
            f"{stack.url}/api/tenant", json={"content_retention_days": days}, headers=stack.headers, timeout=60
        )
        assert response.status_code == 200, response.text

    set_retention(1)
    yield
    set_retention(0)


def test_prompts_and_outputs_are_stored_only_if_logging_is_on(stack: Stack, retention: Any) -> None:
    def is_complete() -> bool:
        answer = post(stack, BODY)
        content = story(stack, answer.headers["x-request-id"], executions=1)["content"]
        if content is None:
            return False  # the gateway has not applied the change yet
        assert json.loads(content["body"]) == BODY
        assert content["answers"] == [answer.json()["choices"][0]["text"]]
        return True

    eventually(is_complete)
