"""Streams whose first token takes long: headers after a delay, then pings, and later failures as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic._streaming
import msgspec
import openai._streaming
import pytest

from inference_worker.contract.messages import AnswerEvent, End
from inference_worker.contract.request import TokenCounts
from millrace.gateway.core.errors import ApiError
from millrace.gateway.http import stream_heartbeat
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints.inference import ChatCompletions, Completions
from millrace.gateway.http.endpoints.messages import Messages
from millrace.gateway.http.endpoints.responses import CreateResponse
from millrace.gateway.http.endpoints.resume import ResumeStream
from tests.support.gateway.streamed_request import TOKENS, RunningRequest, call_endpoint, install_gateway
from tests.support.waiting import eventually_async


class UnfinishedCall:
    """An idempotent call whose request was started by an earlier call. It stores nothing."""

    unfinished_request_id = "req_1"
    keeps_running = failed = False
    restarted: str | None = None

    async def restart(self, request_id: str) -> None:
        self.restarted = request_id

    def record_start(self, *_: Any) -> None: ...

    def record_body(self, *_: Any) -> None: ...

    async def store_response(self, *_: Any) -> None: ...

    async def end(self) -> None: ...


class RepeatedCompletions(ChatCompletions):
    """The second call with an Idempotency-Key."""

    async def begin_idempotent_call(self, content: bytes) -> None:
        self.idempotent_call = UnfinishedCall()  # type: ignore[assignment]


ENDPOINTS = [ChatCompletions, Completions, CreateResponse, Messages]
PING_SECONDS, HEADERS_SECONDS = 0.03, 0.06
LOST = ApiError("worker_lost", "The worker was lost.")


class SilentRequest(RunningRequest):
    """A request whose first token or error comes once its response has some messages.

    Args:
        messages: number of messages before the first event.
        then: number of messages before the end.
        seconds: further time without an event.
    """

    def __init__(self, messages: int, error: ApiError | None = None, then: int = 0, seconds: float = 0.0) -> None:
        super().__init__()
        self.ignored = ("store",)
        self.sent: list[dict[str, Any]] = []
        self._messages, self._error, self._then, self._seconds = messages, error, then, seconds

    async def events(self) -> AsyncIterator[AnswerEvent]:
        await eventually_async(lambda: len(self.sent) >= self._messages)
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        yield TOKENS
        await eventually_async(lambda: len(self.sent) >= self._then)
        yield End("req_1", 1, 1, "stop", None, TokenCounts(1, output=1))


async def call(
    monkeypatch: pytest.MonkeyPatch, request: SilentRequest, consumer: type[HttpConsumer], seconds: float
) -> list[dict[str, Any]]:
    """Return the messages of the response."""
    monkeypatch.setattr(stream_heartbeat, "PING_SECONDS", PING_SECONDS)
    install_gateway(monkeypatch, request, stream_headers_seconds=seconds)
    await call_endpoint(consumer, request.sent)
    return request.sent


def pings(consumer: type[HttpConsumer]) -> bytes:
    is_anthropic = consumer is Messages
    return b'event: ping\ndata: {"type": "ping"}\n\n' if is_anthropic else b": ping\n"


@pytest.mark.parametrize("consumer", [*ENDPOINTS, RepeatedCompletions, ResumeStream])
async def test_headers_and_pings_precede_a_late_token(
    monkeypatch: pytest.MonkeyPatch, consumer: type[HttpConsumer]
) -> None:
    called = asyncio.get_running_loop().time()
    start, *bodies = await call(monkeypatch, SilentRequest(3), consumer, HEADERS_SECONDS)
    assert start["status"] == 200
    assert start["time"] - called >= HEADERS_SECONDS
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers.get(b"x-millrace-ignored") == (b"store" if consumer in ENDPOINTS else None)
    assert b"x-millrace-model" not in headers
    texts = [body["body"] for body in bodies]
    count = texts.count(pings(consumer))
    assert count >= 2
    assert texts[:count] == [pings(consumer)] * count
    assert all(b"data: " in text for text in texts[count:])
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]


@pytest.mark.parametrize("consumer", ENDPOINTS)
async def test_a_failure_after_the_headers_is_an_event(
    monkeypatch: pytest.MonkeyPatch, consumer: type[HttpConsumer]
) -> None:
    start, *bodies = await call(monkeypatch, SilentRequest(1, LOST), consumer, HEADERS_SECONDS)
    assert start["status"] == 200
    *_, last = [line for line in bodies[-1]["body"].splitlines() if line.startswith(b"data: ")]
    error = msgspec.json.decode(last.removeprefix(b"data: "))
    assert error.get("error", error)["message"] == LOST.message
    assert not bodies[-1]["more_body"]


@pytest.mark.parametrize("consumer", ENDPOINTS)
async def test_a_failure_before_the_headers_is_a_status(
    monkeypatch: pytest.MonkeyPatch, consumer: type[HttpConsumer]
) -> None:
    start, body = await call(monkeypatch, SilentRequest(0, LOST), consumer, 60)
    assert start["status"] >= 500
    assert not body["more_body"]


async def test_a_repeated_call_whose_request_failed_is_restarted_unless_its_headers_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[UnfinishedCall] = []

    class Repeated(ChatCompletions):
        async def begin_idempotent_call(self, content: bytes) -> None:
            calls.append(UnfinishedCall())
            self.idempotent_call = calls[-1]  # type: ignore[assignment]

    await call(monkeypatch, SilentRequest(0, LOST), Repeated, 60)
    assert calls[-1].restarted is not None
    start, *bodies = await call(monkeypatch, SilentRequest(1, LOST), Repeated, HEADERS_SECONDS)
    assert start["status"] == 200
    assert (b"x-request-id", b"req_1") in start["headers"]
    assert LOST.message.encode() in bodies[-1]["body"]
    assert (calls[-1].restarted, calls[-1].keeps_running, calls[-1].failed) == (None, False, True)


@pytest.mark.parametrize("consumer", ENDPOINTS)
async def test_a_pause_in_a_stream_has_pings(monkeypatch: pytest.MonkeyPatch, consumer: type[HttpConsumer]) -> None:
    request = SilentRequest(0, then=4)
    start, *bodies = await call(monkeypatch, request, consumer, 2)
    assert (b"x-millrace-model", b"m") in start["headers"]
    texts = [body["body"] for body in bodies]
    first = texts.index(pings(consumer))
    assert texts.count(pings(consumer)) >= 2
    assert any(b"id: " in text and b"data: " in text for text in texts[:first])
    assert not bodies[-1]["more_body"]
    # The SDKs keep the ID of the event before the ping.
    decoders: list[Any] = [openai._streaming.SSEDecoder(), anthropic._streaming.SSEDecoder()]
    for decoder in decoders:
        events = list(decoder.iter_bytes(iter(texts)))
        assert len(events) >= 2
        assert all(event.data == "[DONE]" or event.json() for event in events)


async def test_a_response_without_a_stream_has_no_early_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SilentRequest(0, LOST, seconds=3 * HEADERS_SECONDS)
    request.request = msgspec.structs.replace(request.request, stream=False)
    start, _ = await call(monkeypatch, request, ChatCompletions, HEADERS_SECONDS)
    assert start["status"] == 503
