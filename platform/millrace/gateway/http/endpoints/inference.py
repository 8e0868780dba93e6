"""Chat completions and completions: the same life, two dialects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import structlog

from billing.amounts import decimal
from billing.pricing.pricing import Component, rate
from inference_worker.contract.messages import AnswerEvent, End, Tokens
from millrace.gateway.admission.idempotency import IdempotentCall
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.request_body import too_large
from millrace.gateway.core.types import InferenceRequest, Writer
from millrace.gateway.dispatch.stream_follower import StreamFollower, StreamNotFound
from millrace.gateway.http.consumer import ANY_METHOD, Headers, HttpConsumer
from millrace.gateway.lifecycle.service import ActiveRequest
from millrace.gateway.protocols.openai import chat, completions, embeddings
from millrace.gateway.protocols.prompt_bounds import SMALL_BODY_BYTES
from tenants.keys.snapshot import ApiKeySnapshot


class PromptConsumer(HttpConsumer):
    """POST a body with a prompt. A large one is bounded and charged before it is received, and read elsewhere."""

    reader = ""  # of `dialect_readers.READERS`

    async def read_request(self, key: ApiKeySnapshot) -> InferenceRequest:
        """Receive the body and read it.

        Raises:
            ApiError: 413, it is too large; 429, a limit does not allow it; others, it is no proper request.
        """
        body = await self.read_body()
        request = await self.gateway.prompts.read(key, self.reader, body)
        self.release_body()
        if self.trace is not None:
            self.trace.asked(request, body)
        return request

    async def pieces(self) -> AsyncIterator[bytes]:
        most = self.gateway.settings.max_request_body_bytes
        if self.body.declared is not None:
            await self._admit(min(self.body.declared, most + 1))
        async for piece in self.body.pieces(most):
            await self._admit(self.body.received)
            yield piece

    async def _admit(self, size: int) -> None:
        """Charge a large body, once, and count its memory.

        Raises:
            ApiError: 413, it is larger than this key's prompts can be; 429 or 503, it cannot be read now.
        """
        if size <= SMALL_BODY_BYTES or self.key is None:
            return
        if self.lease is None:
            await self.gateway.prompts.charge(self.key, size)
            self._most = self.gateway.prompts.max_body_bytes(self.key, self.reader)
            self.lease = self.gateway.body_memory.lease(self.key.tenant_id)
        if size > self._most:
            raise too_large(self._most)
        self.lease.grow(size)


class InferenceConsumer(PromptConsumer):
    """POST a request, get its answer, streamed or whole."""

    dialect = ""
    recorded = True

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        request = await self.read_request(key)
        if self.once is None or not await self._go_on(key, self.once, request):
            await self._begin(key, request)

    async def _begin(self, key: ApiKeySnapshot, request: InferenceRequest) -> None:
        call = await self.gateway.service.begin(key, request, self.dialect, self.request_id, self.trace)
        try:
            events = self.gateway.service.events(call)
            # Status and headers wait for the first token: until then a failure is a real HTTP status.
            first = await anext(events)
            self.limit_statuses = call.ticket.limit_statuses
            await self._write(request, call.writer(), call.model, first, events, lambda: _cost(call))
        except (ApiError, OSError):  # it has its verdict, or the client has gone
            raise
        except Exception:
            await self.gateway.service.fault(call)
            raise
        finally:
            returns = self.headers.get(b"x-millrace-resume") == b"1"
            if self.once is not None and call.generation.written:
                returns = self.once.runs_on = True  # the next call with the key continues with it
            self.gateway.service.let_go(call, means_to_return=returns and self.key_died is None)

    async def _go_on(self, key: ApiKeySnapshot, once: IdempotentCall, request: InferenceRequest) -> bool:
        """Answer with what an earlier call under the same Idempotency-Key began. False: nothing has come of that."""
        if once.left is None:
            return False
        following = StreamFollower(self.gateway.dispatcher, once.left, key.tenant_id)
        once.runs_on = True
        async with self.gateway.readers.reading(once.left):
            try:
                events = following.events()
                first = await anext(events)
                form = await following.form()
            except (ApiError, StreamNotFound):  # it was never sent, lost its worker, or was cancelled since nobody came
                once.runs_on = False
                await once.restart(self.request_id)
                return False
            self.request_id = once.left
            if self.trace is not None:
                self.trace.replay_of = once.left
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


def _cost(call: ActiveRequest) -> Headers:
    """Return what the answer costs, exactly, in USD."""
    femto = 0
    for part in (call, *call.more):
        rate_card, usage = part.ticket.terms.rate_card, part.usage
        if rate_card is None or usage is None:
            return []
        tokens = {component: getattr(usage, component) for component in Component if hasattr(usage, component)}
        femto += rate(rate_card, tokens, part.admitted_at).cost_femto
    return [(b"x-millrace-cost-usd", decimal(femto, 15).encode())]


class ChatCompletions(InferenceConsumer):
    endpoint = "chat.completions"
    dialect = reader = chat.DIALECT


class Completions(InferenceConsumer):
    endpoint = "completions"
    dialect = reader = completions.DIALECT


class Embeddings(InferenceConsumer):
    endpoint = "embeddings"
    dialect = reader = embeddings.DIALECT


class Unknown(HttpConsumer):
    """Everything else under /v1."""

    endpoint = "unknown"
    method = ANY_METHOD

    async def handle(self) -> None:
        path = f"{self.http_method} {self.scope['path']}"
        raise ApiError("not_found", f"Unknown request URL: {path}.")
