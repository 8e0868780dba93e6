"""A request's life in the gateway, the same for every dialect: count, route, admit, dispatch, follow, let go."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

import redis.asyncio as redis
import structlog

from inference_worker.engine.chat_template import ChatTemplateError
from inference_worker.engine.request import TokenUsage
from inference_worker.protocol import End, Envelope, Failed, Job, Tokens
from millrace.gateway.admission import Admission, Demand, Ticket
from millrace.gateway.catalogue import ServedModel
from millrace.gateway.dispatch import Dispatcher, Generation
from millrace.gateway.errors import ApiError, invalid
from millrace.gateway.forms import Form, InferenceRequest, Writer, encode_form
from millrace.gateway.metrics import GatewayMetrics
from millrace.gateway.openai import chat, completions
from millrace.gateway.openai.writer import ChatWriter, CompletionWriter
from millrace.gateway.routing import Router
from tenants.snapshot import KeySnapshot

log = structlog.get_logger(__name__)

WRITERS: Mapping[str, Callable[[Form], Writer]] = {chat.DIALECT: ChatWriter, completions.DIALECT: CompletionWriter}
LONG_PROMPT_CHARACTERS = 4_000  # above this, tokenising would hold up the event loop
READERLESS_SECONDS = 30.0  # how long a generation runs on for a client that means to come back


class Call:
    """An admitted, dispatched request."""

    def __init__(self, generation: Generation, ticket: Ticket, form: Form, model: ServedModel) -> None:
        self.generation = generation
        self.ticket = ticket
        self.form = form
        self.model = model
        self.started = time.monotonic()
        self.usage: TokenUsage | None = None

    @property
    def request_id(self) -> str:
        return self.form.request_id

    def writer(self) -> Writer:
        return WRITERS[self.form.dialect](self.form)


class InferenceService:
    def __init__(
        self,
        broker: redis.Redis,
        router: Router,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        *,
        gateway_id: str,
        cache_secret: str,
        request_seconds: int,
    ) -> None:
        self._broker = broker
        self._router = router
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._gateway_id = gateway_id
        self._cache_secret = cache_secret.encode()
        self._request_seconds = request_seconds
        self._background: set[asyncio.Task[None]] = set()

    async def begin(self, key: KeySnapshot, request: InferenceRequest, dialect: str, request_id: str) -> Call:
        """Admit the request and send it on its way.

        Raises:
            ApiError: it cannot be served; nothing was taken.
        """
        candidates = self._router.candidates(key, request.model)
        model = candidates[0].model
        self._dispatcher.require_replica(model.name)
        prompt = await self._tokenise(model, request)
        now = time.time_ns() // 1000
        demand = Demand(request_id, now, key, request.model, candidates, len(prompt), request.max_tokens)
        ticket = await self._admission.admit(demand)
        job = self._job(demand, ticket, request, prompt)
        form = Form(
            dialect,
            request_id,
            model.name,
            now // 1_000_000,
            len(prompt),
            request.include_usage,
            request.continuous_usage,
        )
        try:
            generation = await self._dispatcher.submit(job, encode_form(form))
        except BaseException:
            await ticket.close(None)
            raise
        self._metrics.in_flight.set(self._dispatcher.in_flight)
        return Call(generation, ticket, form, model)

    async def events(self, call: Call) -> AsyncIterator[Tokens | End]:
        """The answer's events, the last of them its end.

        Raises:
            ApiError: the request failed; before the first event this can still be an HTTP status.
        """
        first = True
        while True:
            event = await call.generation.next_event()
            if isinstance(event, Failed):
                call.generation.ended = True
                raise ApiError(event.code, event.message, event.param)
            if first:
                first = False
                self._metrics.time_to_first_token.labels(call.model.name).observe(time.monotonic() - call.started)
            if isinstance(event, End):
                call.generation.ended = True
                call.usage = event.usage
                if event.finish_reason == "cancelled":
                    raise ApiError("cancelled", "The request was cancelled.")
            yield event
            if isinstance(event, End):
                return

    def let_go(self, call: Call, *, means_to_return: bool = False) -> None:
        """The caller is done with the request, or gone. Called once for every call, however it ended."""
        self._dispatcher.release(call.generation)
        self._metrics.in_flight.set(self._dispatcher.in_flight)
        self._in_background(self._close(call, means_to_return))

    async def drain(self) -> None:
        """Wait for what is still being cancelled or closed."""
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _close(self, call: Call, means_to_return: bool) -> None:
        if call.usage is not None:
            self._count(call.model.name, call.usage)
        await call.ticket.close(call.usage)
        if call.generation.ended:
            return
        if means_to_return:
            await asyncio.sleep(READERLESS_SECONDS)
            if await self.has_reader(call.request_id):
                return
        try:
            await self._dispatcher.cancel(call.request_id, call.generation.leg)
        except redis.RedisError as fault:
            log.warning("cancel_lost", request_id=call.request_id, error=str(fault))

    async def has_reader(self, request_id: str) -> bool:
        """Whether somebody resumed the stream."""
        return bool(await self._broker.exists(f"reader:{request_id}"))

    def _count(self, model: str, usage: TokenUsage) -> None:
        for token_class in ("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output"):
            if tokens := getattr(usage, token_class):
                self._metrics.tokens.labels(model, token_class).inc(tokens)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tokenise(self, model: ServedModel, request: InferenceRequest) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
            ids = [item for item in prompt if isinstance(item, int)]
            if any(not 0 <= token_id < model.vocab_size for token_id in ids):
                raise invalid("prompt", f"Token ids of this model are from 0 to {model.vocab_size - 1}.")
            return ids
        size = len(prompt) if isinstance(prompt, str) else sum(len(m["content"]) for m in prompt if isinstance(m, dict))
        if size > LONG_PROMPT_CHARACTERS:
            return await asyncio.to_thread(_encode, model, prompt)
        return _encode(model, prompt)

    def _job(self, demand: Demand, ticket: Ticket, request: InferenceRequest, prompt: list[int]) -> Job:
        key, terms = demand.key, ticket.terms
        model = demand.candidates[0].model.name
        envelope = Envelope(
            admitted_at=demand.admitted_at,
            request_id=demand.request_id,
            leg=0,
            tenant_id=key.tenant_id,
            project_id=key.project_id,
            key_id=key.key_id,
            model=model,
            price_version=terms.price_version,
            slice_id=terms.slice_id,
            fence=terms.fence,
            hold=terms.hold,
        )
        return Job(
            envelope=envelope,
            gateway_id=self._gateway_id,
            prompt_token_ids=prompt,
            params=dataclasses.replace(request.sampling, max_tokens=terms.max_tokens),
            cache_salt=self._cache_salt(key.tenant_id, model, request.cache_key),
            deadline=demand.admitted_at / 1e6 + self._request_seconds,
        )

    def _cache_salt(self, tenant_id: int, model: str, cache_key: str | None) -> bytes:
        """Derived from a secret, so that nobody can hit or forge another tenant's cached prefixes."""
        name = f"{tenant_id}\0{model}\0{cache_key or ''}".encode()
        return hmac.new(self._cache_secret, name, hashlib.sha256).digest()[:16]


def _encode(model: ServedModel, prompt: object) -> list[int]:
    try:
        if isinstance(prompt, str):
            return model.tokenizer.encode(prompt)
        return model.tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]
    except ChatTemplateError as fault:
        raise invalid("messages", str(fault)) from None
