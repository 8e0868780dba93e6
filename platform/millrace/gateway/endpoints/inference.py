"""Chat completions and completions: the same life, two dialects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from billing.amounts import decimal
from billing.pricing import Component, lines
from inference_worker.protocol import End, Tokens
from millrace.gateway.errors import ApiError
from millrace.gateway.forms import InferenceRequest
from millrace.gateway.http import Headers, HttpConsumer
from millrace.gateway.openai import chat, completions
from millrace.gateway.service import Call


class InferenceConsumer(HttpConsumer):
    """POST a request, get its answer, streamed or whole."""

    dialect = ""
    read: Callable[[bytes], InferenceRequest]

    async def handle(self, body: bytes) -> None:
        key = await self.authenticate("inference")
        request = type(self).read(body)
        call = await self.gateway.service.begin(key, request, self.dialect, self.request_id)
        try:
            events = self.gateway.service.events(call)
            # Status and headers wait for the first token: until then a failure is a real HTTP status.
            first = await anext(events)
            self.rate_headers = call.ticket.headers()
            if request.stream:
                await self._stream(call, first, events)
            else:
                await self._whole(call, first, events)
        finally:
            means_to_return = self.headers.get(b"x-millrace-resume") == b"1" and self.key_died is None
            self.gateway.service.let_go(call, means_to_return=means_to_return)

    async def _stream(self, call: Call, event: Tokens | End, events: AsyncIterator[Tokens | End]) -> None:
        writer, sent = call.writer(), 0
        await self.start_stream(_headers(call, event))
        while True:
            datas = writer.stream(event)
            if datas:
                await self.send_events(datas, sent, last=isinstance(event, End))
                sent += len(datas)
            if isinstance(event, End):
                return
            event = await anext(events)

    async def _whole(self, call: Call, event: Tokens | End, events: AsyncIterator[Tokens | End]) -> None:
        parts: list[str] = []
        while not isinstance(event, End):
            parts.append(event.text)
            event = await anext(events)
        answer = call.writer().whole("".join(parts), event)
        await self.respond_json(200, answer, _headers(call, event) + _cost(call, event))


def _headers(call: Call, event: Tokens | End) -> Headers:
    cached = event.usage.cache_read if isinstance(event, End) else event.cached_tokens
    return [
        (b"x-millrace-model", call.model.encode()),
        (b"x-millrace-cache", b"prefix" if cached else b"miss"),
    ]


def _cost(call: Call, end: End) -> Headers:
    """What the answer costs, exactly, in USD."""
    terms, usage = call.ticket.terms, end.usage
    if terms.sheet is None:
        return []
    tokens = {
        Component.UNCACHED: usage.uncached,
        Component.CACHE_READ: usage.cache_read,
        Component.CACHE_WRITE_5M: usage.cache_write_5m,
        Component.CACHE_WRITE_1H: usage.cache_write_1h,
        Component.OUTPUT: usage.output,
    }
    femto = sum(line.femto for line in lines(terms.sheet, tokens, call.admitted_at))
    return [(b"x-millrace-cost-usd", decimal(femto, 15).encode())]


class ChatCompletions(InferenceConsumer):
    endpoint = "chat.completions"
    dialect = chat.DIALECT
    read = staticmethod(chat.read_chat)


class Completions(InferenceConsumer):
    endpoint = "completions"
    dialect = completions.DIALECT
    read = staticmethod(completions.read_completion)


class Unknown(HttpConsumer):
    """Everything else under /v1."""

    endpoint = "unknown"

    async def _run(self, body: bytes, too_large: bool = False) -> None:
        path = f"{self.http_method} {self.scope['path']}"
        await self.respond_error(ApiError("not_found", f"Unknown request URL: {path}."))
