"""Streams of a revoked key whose execution ends before their own tasks are cancelled.

One stream of the key cancels the execution. Another stream of the request reads that end before it is cancelled, if
its first cancellation is lost.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from millrace.gateway.core.errors import ApiError
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints import resume, websocket
from millrace.gateway.http.endpoints.inference import ChatCompletions
from tests.support.gateway.keys import KEY
from tests.support.gateway.streamed_request import RunningRequest, call_endpoint, install_gateway

REVOKED = ApiError("invalid_api_key", "This API key was revoked.")


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> RunningRequest:
    """The request that every endpoint of the gateway streams."""
    running = RunningRequest()
    install_gateway(monkeypatch, running)
    return running


async def revoke(running: RunningRequest) -> None:
    """End the key's requests once the stream has started."""
    await running.is_streaming.wait()
    assert running.end_requests(KEY.key_id, REVOKED) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("consumer", [ChatCompletions, resume.ResumeStream])
async def test_a_stream_ends_with_the_keys_error(running: RunningRequest, consumer: type[HttpConsumer]) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(revoke(running))
        messages = await call_endpoint(consumer)
    sent = b"".join(message.get("body", b"") for message in messages)
    tokens, usage, error = (
        msgspec.json.decode(line.removeprefix(b"data: ")) for line in sent.splitlines() if line.startswith(b"data: ")
    )
    assert tokens == {"event": "tokens"}
    assert usage == {"code": "invalid_api_key", "output": 1 if consumer is ChatCompletions else None}
    assert error["error"]["code"] == "invalid_api_key"


async def test_a_stream_of_a_websocket_ends_with_the_keys_error(running: RunningRequest) -> None:
    received: list[dict[str, Any]] = []
    over = asyncio.Event()
    messages = iter(
        [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": '{"id": "a", "type": "request"}'}]
    )

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await over.wait()
        return {"type": "websocket.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(0.02)  # the client reads slowly
        if message["type"] == "websocket.send":
            received.append(msgspec.json.decode(message["text"]))
            if received[-1]["type"] == "error":
                over.set()

    headers = [(b"x-api-key", b"sk-mr-test")]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(revoke(running))
        await websocket.realtime_chat({"client": None, "headers": headers}, receive, send)
    assert [message["type"] for message in received] == ["ready", "started", "chunk", "chunk", "error"]
    assert received[3]["chunk"] == {"code": "invalid_api_key", "output": 1}
    assert received[4]["error"]["code"] == "invalid_api_key"
