"""Streams of a revoked key whose execution ends before their own tasks are cancelled.

One stream of the key cancels the execution. Another stream of the request reads that end before it is cancelled, if
its first cancellation is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from inference_worker.contract.messages import AnswerEvent, Tokens
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core.body_memory import BodyMemory
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints import resume, websocket
from millrace.gateway.http.endpoints.inference import ChatCompletions
from millrace.gateway.protocols.openai import chat
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.gateway.keys import KEY

REVOKED = ApiError("invalid_api_key", "This API key was revoked.")
CANCELLED = ApiError("cancelled", "The request was cancelled.")
TOKENS = Tokens("req_1", 1, 0, [7], "Hello")


class FakeWriter:
    """A writer whose events name their type, or the usage."""

    def stream(self, event: AnswerEvent) -> list[bytes]:
        return [b'{"event":"tokens"}']

    def interrupt(self, code: str, usage: TokenCounts | None) -> list[bytes]:
        return [msgspec.json.encode({"code": code, "output": usage and usage.output})]


class RunningRequest:
    """A request that has generated one token and runs until its key is revoked."""

    def __init__(self) -> None:
        self.request = InferenceRequest("m", prompt=[{}], sampling=SamplingParams(), max_tokens=5, stream=True)
        self.prompt = SimpleNamespace(dropped_messages=0)
        self.execution = SimpleNamespace(admitted=SimpleNamespace(limit_statuses=[]), answer=None, written=True)
        self.further_prompts: list[Any] = []
        self.ignored = ()
        self.model, self.request_id = "m", "req_1"
        self.is_streaming = asyncio.Event()

    def writer(self) -> FakeWriter:
        return FakeWriter()

    async def events(self) -> AsyncIterator[AnswerEvent]:
        yield TOKENS
        self.is_streaming.set()
        with contextlib.suppress(asyncio.CancelledError):  # redis-py swallows one that arrives while it connects
            await asyncio.Event().wait()
        raise CANCELLED

    async def final_usage(self) -> TokenCounts:
        return TokenCounts(output=1)


class FakeFollower:
    """A follower of the gateway's only request."""

    def __init__(self, running: RunningRequest, request_id: str, tenant_id: int, project_id: int) -> None:
        self.events = running.events

    async def response_spec(self) -> Any:
        return SimpleNamespace(dialect=chat.DIALECT, model="m")

    async def cancel(self) -> None:
        """Cancel nothing: the request has ended."""


@contextlib.asynccontextmanager
async def subscription(request_id: str) -> AsyncIterator[str]:
    yield "subscriber"


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> RunningRequest:
    """The request that every endpoint of the gateway streams."""
    running = RunningRequest()

    async def authenticate(*_: Any) -> ApiKeySnapshot:
        return KEY

    async def begin(*_: Any) -> RunningRequest:
        return running

    async def read(*_: Any) -> InferenceRequest:
        return running.request

    async def nothing(*_: Any) -> list[Any]:
        return []

    counted = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None))
    gateway = SimpleNamespace(
        keys=SimpleNamespace(authenticate=authenticate),
        active_requests=ActiveRequests(),
        admission=SimpleNamespace(current_limit_statuses=nothing),
        body_memory=BodyMemory(),
        cross_origin=SimpleNamespace(response_headers=lambda *_: []),
        dispatcher=running,
        metrics=SimpleNamespace(requests=counted),
        prompts=SimpleNamespace(read=read, charge=nothing, max_body_bytes=lambda *_: 1000),
        request_log=SimpleNamespace(end=lambda *_, **__: None),
        service=SimpleNamespace(
            begin=begin,
            events=lambda active: active.events(),
            release=lambda *_, **__: None,
            writer=lambda _: FakeWriter(),
        ),
        settings=SimpleNamespace(max_request_body_bytes=1000, allowed_origins=()),
        subscribers=SimpleNamespace(subscription=subscription, leave=nothing),
    )
    for module in ("consumer", "endpoints.websocket"):
        monkeypatch.setattr(f"millrace.gateway.http.{module}.running_gateway", lambda: gateway)
    monkeypatch.setattr(resume, "StreamFollower", FakeFollower)
    running.end_requests = gateway.active_requests.end  # type: ignore[attr-defined]
    return running


async def revoke(running: RunningRequest) -> None:
    """End the key's requests once the stream has started."""
    await running.is_streaming.wait()
    assert running.end_requests(KEY.key_id, REVOKED) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("consumer", [ChatCompletions, resume.ResumeStream])
async def test_a_stream_ends_with_the_keys_error(running: RunningRequest, consumer: type[HttpConsumer]) -> None:
    sent, over = b"", asyncio.Event()
    has_body = consumer.method == "POST"
    messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}] * has_body)

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += message.get("body", b"")
        if message["type"] == "http.response.body" and not message["more_body"]:
            over.set()

    scope = {"type": "http", "method": consumer.method, "path": "/v1/x", "client": ("127.0.0.1", 1)}
    scope |= {"headers": [(b"content-length", b"2")] * has_body, "url_route": {"kwargs": {"request_id": "req_1"}}}
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(revoke(running))
        await consumer.as_asgi()(scope, receive, send)
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
