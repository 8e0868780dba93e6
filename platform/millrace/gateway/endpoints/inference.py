"""Chat completions and completions: the same life, two dialects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import structlog

from billing.amounts import decimal
from billing.pricing import Component, rate
from inference_worker.protocol import AnswerEvent, End, Tokens
from millrace.gateway.errors import ApiError
from millrace.gateway.following import Following, Gone
from millrace.gateway.forms import InferenceRequest, Writer
from millrace.gateway.http import Headers, HttpConsumer
from millrace.gateway.idempotency import Once
from millrace.gateway.openai import chat, completions, embeddings
from millrace.gateway.service import Call
from tenants.snapshot import KeySnapshot


class InferenceConsumer(HttpConsumer):
    """POST a request, get its answer, streamed or whole."""

    dialect = ""
    recorded = True
    read: Callable[[bytes], InferenceRequest]

    async def handle(self, body: bytes) -> None:
        key = await self.authenticate("inference")
        request = type(self).read(body)
        if self.trail is not None:
            self.trail.asked(request, body)
        if self.once is None or not await self._go_on(key, self.once, request):
            await self._begin(key, request)

    async def _begin(self, key: KeySnapshot, request: InferenceRequest) -> None:
        call = await self.gateway.service.begin(key, request, self.dialect, self.request_id, self.trail)
        try:
            events = self.gateway.service.events(call)
            # Status and headers wait for the first token: until then a failure is a real HTTP status.
            first = await anext(events)
            self.standings = call.ticket.standings
            await self._write(request, call.writer(), call.model, first, events, lambda: _cost(call))
        except (ApiError, OSError):  # it has its verdict, or the client has gone
            raise
        except Exception:
            await self.gateway.service.fault(call)
            raise
        finally:
            returns = self.headers.get(b"x-millrace-resume") == b"1"
            if self.once is not None and call.generation.written:
                returns = self.once.runs_on = True  # whoever sends the key again goes on with it
            self.gateway.service.let_go(call, means_to_return=returns and self.key_died is None)

    async def _go_on(self, key: KeySnapshot, once: Once, request: InferenceRequest) -> bool:
        """Answer with what an earlier call under the same Idempotency-Key began. False: nothing has come of that."""
        if once.left is None:
            return False
        following = Following(self.gateway.dispatcher, once.left, key.tenant_id)
        once.runs_on = True
        async with self.gateway.readers.reading(once.left):
            try:
                events = following.events()
                first = await anext(events)
                form = await following.form()
            except (ApiError, Gone):  # it was never sent, lost its worker, or was cancelled since nobody came
                once.runs_on = False
                await once.anew(self.request_id)
                return False
            self.request_id = once.left
            if self.trail is not None:
                self.trail.replay_of = once.left
            await self._write(request, self.gateway.service.writer(form), form.model, first, events)
        return True

    async def _write(
        self,
        request: InferenceRequest,
        writer: Writer,
        model: str,
        first: AnswerEvent,
        events: AsyncIterator[AnswerEvent],
        cost: Callable[[], Headers] = lambda: [],
    ) -> None:
        structlog.contextvars.bind_contextvars(model=model)
        headers = _headers(model, first)
        if request.stream:
            await self._stream(writer, headers, first, events)
        else:
            answer = writer.whole([first, *[later async for later in events]])
            await self.respond_json(200, answer, headers + cost())

    async def _stream(
        self, writer: Writer, headers: Headers, event: AnswerEvent, events: AsyncIterator[AnswerEvent]
    ) -> None:
        sent = 0
        await self.start_stream(headers)
        while True:
            datas = writer.stream(event)
            if datas:
                await self.send_events(datas, sent, last=isinstance(event, End))
                sent += len(datas)
            if isinstance(event, End):
                return
            event = await anext(events)


def _headers(model: str, first: AnswerEvent) -> Headers:
    cached = isinstance(first, Tokens) and first.prompt is not None and first.prompt.cache_read
    return [
        (b"x-millrace-model", model.encode()),
        (b"x-millrace-cache", b"prefix" if cached else b"miss"),
    ]


def _cost(call: Call) -> Headers:
    """What the answer costs, exactly, in USD."""
    femto = 0
    for part in (call, *call.more):
        sheet, usage = part.ticket.terms.sheet, part.usage
        if sheet is None or usage is None:
            return []
        tokens = {component: getattr(usage, component) for component in Component if hasattr(usage, component)}
        femto += rate(sheet, tokens, part.admitted_at).cost_femto
    return [(b"x-millrace-cost-usd", decimal(femto, 15).encode())]


class ChatCompletions(InferenceConsumer):
    endpoint = "chat.completions"
    dialect = chat.DIALECT
    read = staticmethod(chat.read_chat)


class Completions(InferenceConsumer):
    endpoint = "completions"
    dialect = completions.DIALECT
    read = staticmethod(completions.read_completion)


class Embeddings(InferenceConsumer):
    endpoint = "embeddings"
    dialect = embeddings.DIALECT
    read = staticmethod(embeddings.read_embeddings)


class Unknown(HttpConsumer):
    """Everything else under /v1."""

    endpoint = "unknown"

    async def _run(self, body: bytes, too_large: bool = False) -> None:
        path = f"{self.http_method} {self.scope['path']}"
        await self.respond_error(ApiError("not_found", f"Unknown request URL: {path}."))
