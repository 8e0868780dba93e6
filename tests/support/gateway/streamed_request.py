"""A gateway of fakes, whose only request is streamed by its endpoints."""

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
from millrace.gateway.core.cors import CrossOrigin
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints import inference, resume
from millrace.gateway.protocols.openai import chat
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.gateway.keys import KEY

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
        self.execution = SimpleNamespace(
            admitted=SimpleNamespace(limit_statuses=[]),
            answer=None,
            written=True,
            response_spec=SimpleNamespace(truncated=""),
        )
        self.further_prompts: list[Any] = []
        self.ignored = ()
        self.decision_record = DecisionRecord()
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
        return SimpleNamespace(dialect=chat.DIALECT, model="m", checked=None, truncated="")

    async def cancel(self) -> None:
        """Cancel nothing: the request has ended."""


@contextlib.asynccontextmanager
async def subscription(request_id: str) -> AsyncIterator[str]:
    yield "subscriber"


def install_gateway(
    monkeypatch: pytest.MonkeyPatch, running: RunningRequest, stream_headers_seconds: float = 15
) -> None:
    """Let every endpoint stream this request."""

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
        cross_origin=CrossOrigin((), None),  # type: ignore[arg-type]  # no database: no request has an origin
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
        settings=SimpleNamespace(
            max_request_body_bytes=1000, allowed_origins=(), stream_headers_seconds=stream_headers_seconds
        ),
        subscribers=SimpleNamespace(subscription=subscription, leave=nothing),
    )
    for module in ("consumer", "endpoints.websocket"):
        monkeypatch.setattr(f"millrace.gateway.http.{module}.running_gateway", lambda: gateway)
    for endpoints in (inference, resume):
        monkeypatch.setattr(endpoints, "StreamFollower", FakeFollower)
    running.end_requests = gateway.active_requests.end  # type: ignore[attr-defined]


async def call_endpoint(consumer: type[HttpConsumer], sent: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Call an endpoint and return the messages that it sends, each with the `time` of the loop.

    Args:
        sent: a list to which each message is appended as it is sent.
    """
    sent = [] if sent is None else sent
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    has_body = consumer.method == "POST"
    messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}] * has_body)

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert not over.is_set()
        sent.append({**message, "time": loop.time()})
        if message["type"] == "http.response.body" and not message["more_body"]:
            over.set()

    scope = {
        "type": "http",
        "method": consumer.method,
        "path": "/v1/x",
        "client": ("127.0.0.1", 1),
        "query_string": b"",
        "headers": [(b"content-length", b"2")] * has_body,
        "url_route": {"kwargs": {"request_id": "req_1"}},
    }
    await consumer.as_asgi()(scope, receive, send)
    return sent
