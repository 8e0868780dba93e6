"""/v1/realtime/chat with the websockets library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import websockets
from openai.types.chat import ChatCompletionChunk
from websockets.sync.client import connect

from tests.support.e2e.keys import make_key, revoke_key
from tests.support.e2e.websocket import FRANCE, Client, socket
from tests.support.stack import MODEL, Stack, eventually

ENDLESS = {"max_tokens": 2000, "ignore_eos": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with socket(stack, additional_headers=stack.headers) as opened:
        assert opened.receive() == {"type": "ready"}
        yield opened


def text_of(messages: list[dict[str, Any]]) -> str:
    chunks = [
        ChatCompletionChunk.model_validate(message["chunk"]) for message in messages if message["type"] == "chunk"
    ]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_output_and_usage_are_the_same_as_over_http(stack: Stack, client: Client) -> None:
    client.submit("a")
    messages = client.receive_all("a")
    assert (messages[0]["type"], messages[0]["model"], messages[-1]["type"]) == ("started", MODEL, "done")
    body = {"model": MODEL, "messages": FRANCE, "max_tokens": 8, "temperature": 0}
    whole = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=60).json()
    assert text_of(messages) == whole["choices"][0]["message"]["content"]
    event = stack.event(messages[0]["request_id"])
    assert (event["output"], event["outcome"]) == (whole["usage"]["completion_tokens"], "completed")


def test_concurrent_requests_and_a_cancelled_one(stack: Stack, client: Client) -> None:
    """An error waits half a second for the billed usage, which a busy machine can exceed."""
    assert any(has_billed_usage_after_cancellation(stack, client) for _ in range(3))
    client.submit("b")  # the ID can be used again
    assert client.receive_all("b")[-1]["type"] == "done"


def has_billed_usage_after_cancellation(stack: Stack, client: Client) -> bool:
    """Cancel one of three requests, check their ends, and return whether the last usage is the billed one."""
    for name in "abc":
        client.submit(name, **(ENDLESS if name == "b" else {"max_tokens": 12}))
    messages: dict[str, list[dict[str, Any]]] = {"a": [], "b": [], "c": []}
    cancelled = False
    while not all(received and received[-1]["type"] in ("done", "error") for received in messages.values()):
        message = client.receive()
        messages[message["id"]].append(message)
        if message["id"] == "b" and len(messages["b"]) == 5 and not cancelled:
            cancelled = True
            client.send_message(type="cancel", id="b")
    assert [messages[name][-1]["type"] for name in "abc"] == ["done", "error", "done"]
    assert messages["b"][-1]["error"]["code"] == "cancelled"
    assert text_of(messages["a"]) == text_of(messages["c"])
    event = stack.event(messages["b"][0]["request_id"])
    assert event["outcome"] == "cancelled"
    reported = messages["b"][-2]["chunk"]["usage"]["completion_tokens"]
    assert 1 <= reported <= event["output"] < 500
    return bool(reported == event["output"])


def test_a_closed_websocket_cancels_its_requests(stack: Stack) -> None:
    with socket(stack, additional_headers=stack.headers) as client:
        client.receive()
        client.submit("a", **ENDLESS)
        started = client.receive()
    assert stack.event(started["request_id"])["outcome"] == "cancelled"
    eventually(lambda: stack.metric("millrace_kv_blocks_used") == 0)


@pytest.mark.parametrize(
    ("message", "name", "code", "param"),
    [
        ("nonsense", None, "invalid_json", None),
        ("[]", None, "invalid_json", None),
        ("{}", None, "invalid_value", "id"),
        ('{"id": "x", "type": "dance"}', "x", "invalid_value", "type"),
        ('{"id": "x", "type": "cancel"}', "x", "not_found", "id"),
        ('{"id": "x", "stream": false}', "x", "invalid_value", "stream"),
        (f'{{"id": "x", "model": "{MODEL}"}}', "x", "missing_required_parameter", "messages"),
        (
            '{"id": "x", "model": "none", "messages": [{"role": "user", "content": "a"}]}',
            "x",
            "model_not_found",
            "model",
        ),
        (json.dumps({"id": "x", "model": "x" * (3 << 20)}), None, "request_too_large", None),
    ],
)
def test_errors_are_sent_and_the_websocket_stays_open(
    client: Client, message: str, name: str | None, code: str, param: str | None
) -> None:
    client.socket.send(message)
    received = client.receive()
    assert (received["type"], received["id"], received["error"]["code"], received["error"]["param"]) == (
        "error",
        name,
        code,
        param,
    )
    client.submit("a", max_tokens=1)
    assert client.receive_all("a")[-1]["type"] == "done"


def test_an_id_of_a_running_request_is_rejected(client: Client) -> None:
    client.submit("a", **ENDLESS)
    client.submit("a")
    received = client.receive()
    while received["type"] != "error":
        received = client.receive()
    assert received["error"]["code"] == "conflict"


def test_the_key_can_be_sent_in_the_first_message(stack: Stack) -> None:
    with socket(stack) as client:
        client.send_message(type="auth", key=stack.key)
        assert client.receive() == {"type": "ready"}
        client.submit("a", max_tokens=1)
        assert client.receive_all("a")[-1]["type"] == "done"


@pytest.mark.parametrize("message", ['{"type": "auth", "key": "sk-mr-unknown"}', '{"id": "a", "model": "m"}', "x"])
def test_a_websocket_without_a_valid_key_is_closed(stack: Stack, message: str) -> None:
    with socket(stack) as client:
        client.socket.send(message)
        assert client.receive()["type"] == "error"
        with pytest.raises(websockets.ConnectionClosedError) as exc_info:
            client.receive()
        assert exc_info.value.rcvd is not None
        assert exc_info.value.rcvd.code == 4401


def test_a_revoked_key_ends_running_requests_and_rejects_new_ones(stack: Stack) -> None:
    secret = make_key(stack, "for a socket")
    with socket(stack, additional_headers={"x-api-key": secret}) as client:
        client.receive()
        client.submit("a", **ENDLESS)
        assert client.receive()["type"] == "started"
        revoke_key(stack, secret)
        revoked = time.monotonic()
        assert client.receive_all("a")[-1]["error"]["code"] == "invalid_api_key"
        assert time.monotonic() - revoked < 5
        client.submit("b")
        assert client.receive_all("b")[-1]["error"]["code"] == "invalid_api_key"


def test_pages_of_other_origins_are_rejected(stack: Stack) -> None:
    for origin in (stack.url, None):
        with socket(stack, origin=origin, additional_headers=stack.headers) as client:
            assert client.receive() == {"type": "ready"}
    for origin in ("https://evil.example", "null", f"{stack.url}.evil.example"):
        with pytest.raises(websockets.InvalidStatus) as exc_info, socket(stack, origin=origin):
            pass
        assert exc_info.value.response.status_code == 403
    url = f"{stack.url.replace('http', 'ws')}/v1/elsewhere"
    with pytest.raises(websockets.InvalidStatus), connect(url):
        pass
