"""`Idempotency-Key` on the running platform: one execution, one charge, and the same response bytes."""

from __future__ import annotations

import threading
import time
import uuid

import httpx2
import pytest

from tests.support.e2e.idempotency import PATH, body, named, post
from tests.support.stack import MODEL, Stack, eventually


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/v1/responses"])
def test_the_second_call_gets_the_first_calls_response(stack: Stack, name: str, path: str, stream: bool) -> None:
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 16} if path == "/v1/responses" else body()
    if path == "/v1/messages":
        del asked["ignore_eos"]
    first = post(stack, name, {**asked, "stream": stream}, path)
    again = post(stack, name, {**asked, "stream": stream}, path)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    same = ("content-type", "x-request-id", "x-millrace-model", "x-millrace-cache")
    assert [again.headers[each] for each in same] == [first.headers[each] for each in same]
    stack.event(first.headers["x-request-id"])
    events = stack.events(limit="5")
    assert [each["request_id"] for each in events].count(first.headers["x-request-id"]) == 1
    assert events[0]["request_id"] == first.headers["x-request-id"]  # no other request ran


def test_the_same_key_with_another_body_is_a_conflict(stack: Stack, name: str) -> None:
    assert post(stack, name, body()).status_code == 200
    for answer in (post(stack, name, body(6)), post(stack, name, body(), "/v1/completions")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_conflict")
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
    assert post(stack, name, body()).headers["idempotent-replayed"] == "true"
    assert post(stack, "x" * 256, body()).status_code == 400


def test_a_concurrent_call_is_rejected_with_a_retry_time(stack: Stack, name: str) -> None:
    answers: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(stack, name, body(80))))
    asking.start()
    time.sleep(0.5)
    early = post(stack, name, body(80))
    asking.join()
    assert (early.status_code, early.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert early.headers["retry-after"] == "1"
    assert "x-should-retry" not in early.headers
    assert post(stack, name, body(80)).content == answers[0].content


def test_a_rejection_is_not_stored(stack: Stack, name: str) -> None:
    for _ in range(2):
        refused = post(stack, name, body(temperature=9))
        assert refused.status_code == 400
        assert "idempotent-replayed" not in refused.headers
    assert post(stack, name, body()).status_code == 200


def test_after_a_lost_connection_the_next_call_gets_the_running_response(stack: Stack, name: str) -> None:
    asked = body(40, stream=True, stream_options={"include_usage": True})
    with httpx2.stream("POST", stack.url + PATH, json=asked, headers=named(stack, name), timeout=60) as response:
        request_id = response.headers["x-request-id"]
        lines = response.iter_lines()
        begun = [next(lines) for _ in range(12)]
    eventually(lambda: post(stack, name, asked).status_code == 200)
    whole = post(stack, name, asked)
    assert whole.headers["x-request-id"] == request_id
    assert whole.text.splitlines()[:12] == begun
    assert '"completion_tokens":40' in whole.text
    assert whole.text.rstrip().endswith("data: [DONE]")
    event = stack.event(request_id)
    assert (event["outcome"], event["output"]) == ("completed", 40)
