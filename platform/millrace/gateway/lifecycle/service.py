"""A request's life in the gateway, the same for every dialect: count, route, admit, dispatch, follow, let go."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Coroutine

import redis.asyncio as redis
import structlog

from inference_worker.contract.messages import AnswerEvent, BillingContext, End, Failed, Tokens
from inference_worker.contract.request import ServiceClass, TokenUsage
from millrace.gateway.admission.admission import Admission, AdmissionLease, AdmissionRequest
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.admission.limits import is_long
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.multi_prompt import merged, part_id, whole_id
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec, Writer, encode_response_spec
from millrace.gateway.dispatch.dispatched_execution import DispatchedExecution, DispatchRequest
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.lifecycle.request_log import RequestTrace
from millrace.gateway.protocols.prompts import tokenize
from millrace.gateway.protocols.writers import make_writer
from millrace.gateway.routing.router import Candidate, Route, Router
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

READERLESS_SECONDS = 30.0  # how long a generation runs on for a client that means to come back
POLL_SECONDS = 1.0
END_SECONDS = 30.0  # how long a cancelled execution's end is waited for
TOLD_HERE = ("stream_lost", "timeout")  # failures of which the execution may know nothing: it may even have ended well
# Failure -> what a policy calls it. Any other is the request's own and the same everywhere. A request that was lost
# with several workers (`not_served`) is not sent to another model: it would end that model's workers too.
FALLBACK = {
    OVERLOADED: "overload",
    "model_loading": "overload",
    "worker_lost": "error",
    "internal_error": "error",
    "context_length_exceeded": "context",
}


class ActiveRequest:
    """An admitted request, and its execution that answers or is waited for."""

    def __init__(
        self,
        key: ApiKeySnapshot,
        request: InferenceRequest,
        dialect: str,
        request_id: str,
        prompt: Prompt,
        measure: ServedModel,
        route: Route,
    ) -> None:
        self.key = key
        self.request = request
        self.dialect = dialect
        self.request_id = request_id
        self.prompt = prompt
        self.counted_by = measure.tokenizer  # whose tokens the prompt is in
        self.route = route
        self.untried = list(route.candidates)
        self.why = route.why
        self.admitted_at = time.time_ns() // 1000
        self.started = time.monotonic()
        self.more: list[ActiveRequest] = []  # of the request's further prompts
        self.executions = 0
        self.usage: TokenUsage | None = None
        self.tokens_seen = 0  # generated, as far as events told
        self.first_at: float | None = None  # monotonic: its first token came
        self.said: dict[int, list[str]] = {}  # texts of its answers, where the tenant has them kept
        # Set with its first execution.
        self.candidate: Candidate
        self.form: ResponseSpec
        self.ticket: AdmissionLease
        self.generation: DispatchedExecution

    @property
    def model(self) -> str:
        """The deployment that answers."""
        return self.candidate.model.name

    def writer(self) -> Writer:
        return make_writer(self.form, self.candidate.model.tokenizer)

    def may_fall_back(self, fault: ApiError) -> bool:
        """Whether another candidate may try after this failure."""
        return bool(self.untried) and FALLBACK.get(fault.code) in self.route.fallback_on

    def skip(self, fault: ApiError) -> None:
        """Write down why a candidate did not answer."""
        self.why.setdefault("skipped", []).append({"model": self.model, "why": fault.code})


class InferenceService:
    def __init__(
        self,
        router: Router,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        live: ActiveRequests,
        readers: StreamSubscribers,
        jobs: InferenceJobBuilder,
        disk: DiskWatch,
    ) -> None:
        self._router = router
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._live = live
        self._readers = readers
        self._jobs = jobs
        self._disk = disk
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._tokenizing = asyncio.Lock()

    async def begin(
        self,
        key: ApiKeySnapshot,
        request: InferenceRequest,
        dialect: str,
        request_id: str,
        trace: RequestTrace | None = None,
    ) -> ActiveRequest:
        """Admit the request and send it on its way. Its `trace` is told how far each prompt gets.

        Raises:
            ApiError: it cannot be served; nothing was taken.
        """
        self._disk.require_space()
        call = await self._begin(key, request, dialect, request_id, trace)
        try:
            for number, prompt in enumerate(request.more_prompts, 1):
                part = dataclasses.replace(request, prompt=prompt, more_prompts=(), number=number)
                call.more.append(await self._begin(key, part, dialect, part_id(request_id, number), trace))
        except BaseException as exc:
            if isinstance(exc, Exception):  # else its caller has gone
                await self.fault(call, exc.code if isinstance(exc, ApiError) else "internal_error")
            self.let_go(call)
            raise
        return call

    async def count(self, key: ApiKeySnapshot, request: InferenceRequest) -> int:
        """Count the tokens of the request's prompt.

        Raises:
            ApiError: the key may not use its model, or it is no prompt for that.
        """
        return len((await self._tokenize(self._router.measure(key, request.model), request)).ids)

    def events(self, call: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        """Return the answer's events, the last of them its end.

        Raises:
            ApiError: the request failed; before the first event this can still be an HTTP status.
        """
        return merged([self._events(part) for part in (call, *call.more)], call.request.sampling.n)

    def let_go(self, call: ActiveRequest, *, means_to_return: bool = False) -> None:
        """Release the request after its end or its caller's disconnect. Called once for every request."""
        for part in (call, *call.more):
            self._in_background(self._close(part, means_to_return))

    async def fault(self, call: ActiveRequest, code: str = "internal_error") -> None:
        """Mark the request as failed before reporting an internal error or a rejection, so that it is never billed."""
        for part in (call, *call.more):
            await self._abandon(part.generation, code)

    async def drain(self) -> None:
        """Wait for what is still being cancelled or closed."""
        self._stopping.set()
        await asyncio.gather(*self._background, return_exceptions=True)

    # One prompt.

    async def _begin(
        self, key: ApiKeySnapshot, request: InferenceRequest, dialect: str, request_id: str, trace: RequestTrace | None
    ) -> ActiveRequest:
        measure = self._router.measure(key, request.model)
        prompt = await self._tokenize(measure, request)
        route = self._router.route(
            key,
            request.model,
            request_id,
            len(prompt.ids),
            tools=bool(request.tools),
            schema=request.structured is not None,
        )
        why = route.why
        why |= {name: told for name in ("metadata", "user") if (told := getattr(request, name))}
        call = ActiveRequest(key, request, dialect, request_id, prompt, measure, route)
        if trace is not None:
            trace.calls.append(call)
        await self._next_execution(call)
        return call

    async def _events(self, call: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        first = True
        while True:
            event = await call.generation.next_event()
            if isinstance(event, Failed):
                fault = ApiError(event.code, event.message, event.param, retry_after=call.generation.retry_after)
                call.generation.ended = True
                if event.code in TOLD_HERE:
                    await self._abandon(call.generation, event.code)
                if not (first and call.may_fall_back(fault)):
                    raise fault
                await self._fall_back(call, fault)
                continue
            if first:
                first = False
                call.first_at = time.monotonic()
                self._metrics.time_to_first_token.labels(call.model).observe(call.first_at - call.started)
            if isinstance(event, End):
                call.generation.ended = True
                await self._record_usage(call, event.usage)
                if event.finish_reason == "cancelled":
                    raise ApiError("cancelled", "The request was cancelled.")
            elif isinstance(event, Tokens):
                call.tokens_seen += len(event.token_ids)
                if call.key.content_retention_days:
                    call.said.setdefault(event.index, []).append(event.text)
            yield event
            if isinstance(event, End):
                return

    async def _record_usage(self, call: ActiveRequest, usage: TokenUsage) -> None:
        """Record what the execution used, and release the rest of its reservation."""
        call.usage = usage
        await self._admission.end(call.generation.job.billing_context, call.ticket.terms, usage)

    def writer(self, form: ResponseSpec) -> Writer:
        """For an answer that is followed.

        Raises:
            ApiError: 404, its model is not served here any more.
        """
        model = self._router.served(form.model)
        if model is None:
            raise ApiError("not_found", f"The model {form.model!r} of this request is not served here any more.")
        return make_writer(form, model.tokenizer)

    # Executions.

    async def _next_execution(self, call: ActiveRequest) -> None:
        """Let the next candidate try, or the one after it.

        Raises:
            ApiError: none of them can.
        """
        while True:
            call.candidate = call.untried.pop(0)
            try:
                return await self._begin_execution(call)
            except ApiError as exc:
                if not call.may_fall_back(exc):
                    raise
                call.skip(exc)

    async def _tokenize(self, model: ServedModel, request: InferenceRequest) -> Prompt:
        """Return the prompt in the model's tokens.

        Between two prompts that are tokenized on the event loop, the loop handles what else has happened.

        Raises:
            ApiError: 400, it is no prompt for this model.
        """
        if request.tokenized is not None:
            return await tokenize(model, request)
        async with self._tokenizing:
            prompt = await tokenize(model, request)
            await asyncio.sleep(0)
            return prompt

    async def _begin_execution(self, call: ActiveRequest) -> None:
        key, model = call.key, call.candidate.model
        if model.tokenizer is not call.counted_by:
            call.prompt, call.counted_by = await self._tokenize(model, call.request), model.tokenizer
        batch = call.request.service_class == ServiceClass.BATCH
        self._dispatcher.require_room(model.name, key.tenant_id, key.weight, batch=batch)
        demand = AdmissionRequest(
            call.request_id,
            call.admitted_at,
            key,
            call.request.model,
            [call.candidate, *call.untried],
            len(call.prompt.ids),
            call.request.max_tokens,
            0 if call.prompt.input_lengths else call.request.sampling.n,
            call.request.prompt_param,
            writes_5m=any(each.seconds == 300 for each in call.prompt.breakpoints),
            writes_1h=any(each.seconds == 3600 for each in call.prompt.breakpoints),
            service_class=call.request.service_class,
            charged=call.request.charged,
        )
        echo = await self._echo(model, call) if call.request.echo else None
        ticket = await self._admission.admit(demand)
        billing_context = self._jobs.billing_context(demand, ticket.terms, execution=call.executions)
        try:
            dispatch_request = self._dispatch_request(call, demand, ticket, billing_context, echo)
            call.generation = self._dispatcher.submit(dispatch_request)
        except BaseException:
            await self._dispatcher.never_ran(billing_context)
            await ticket.close(None)
            raise
        call.ticket = ticket
        call.executions += 1
        self._metrics.in_flight.set(self._dispatcher.in_flight)

    async def _echo(self, model: ServedModel, call: ActiveRequest) -> list[list[int]]:
        """Return the prompts, for an answer that begins with them."""
        more = enumerate(call.request.more_prompts, 1)
        others = [dataclasses.replace(call.request, prompt=prompt, number=number) for number, prompt in more]
        return [call.prompt.ids, *[(await self._tokenize(model, other)).ids for other in others]]

    def _dispatch_request(
        self,
        call: ActiveRequest,
        demand: AdmissionRequest,
        ticket: AdmissionLease,
        billing_context: BillingContext,
        echo: list[list[int]] | None,
    ) -> DispatchRequest:
        request = call.request
        call.form = ResponseSpec(
            call.dialect,
            call.request_id,
            call.model,
            call.admitted_at // 1_000_000,
            len(call.prompt.ids),
            request.include_usage,
            request.continuous_usage,
            request.service_class,
            request.sampling.n,
            1 + len(request.more_prompts),
            [tool.name for tool in request.tools] if request.tool_choice != "none" else [],
            echo,
            request.asked,
        )
        return DispatchRequest(
            job=self._jobs.make(billing_context, demand, ticket.terms, request, call.prompt),
            form=encode_response_spec(call.form),
            weight=call.key.weight,
            long=is_long(demand.limit_sets, len(call.prompt.ids)),
            first_attempt=call.generation.attempt + 1 if call.executions else 1,
            why=call.why,
        )

    async def _fall_back(self, call: ActiveRequest, fault: ApiError) -> None:
        """Start the next candidate's execution after a failure before the first token."""
        log.info("fallback_started", request_id=call.request_id, model=call.model, code=fault.code)
        call.skip(fault)
        self._dispatcher.release(call.generation)
        await call.ticket.close(None)
        try:
            await self._next_execution(call)
        except ApiError:
            raise fault from None  # what went wrong first is what the caller should know

    # The end.

    async def _close(self, call: ActiveRequest, means_to_return: bool) -> None:
        generation = call.generation
        try:
            if not generation.ended:
                if means_to_return and not await self._wait_for_return(call):
                    return  # its places come back when their lease ends, and nothing else does: nobody saw its end
                await self._end(call)
            await call.ticket.close(call.usage)
        finally:
            self._dispatcher.release(generation)
            self._metrics.in_flight.set(self._dispatcher.in_flight)
            if call.usage is not None:
                self._count(call.model, call.usage)

    async def _wait_for_return(self, call: ActiveRequest) -> bool:
        """Let it run on for a while without a reader, and for as long as somebody resumed it. False: this gateway
        stops, and the execution runs on for clients that resume it at another."""
        died = asyncio.Event()
        with self._live.listed(call.key, lambda _: died.set()):
            name = whole_id(call.request_id)
            await self._readers.first_left(name)
            alone = 0.0
            while alone < READERLESS_SECONDS and not call.generation.over and not died.is_set():
                if self._stopping.is_set():
                    return False
                await _first(died, self._stopping, seconds=POLL_SECONDS)
                alone = 0.0 if await self._readers.any(name) else alone + POLL_SECONDS
        return True

    async def _abandon(self, generation: DispatchedExecution, code: str) -> None:
        """Mark the execution as failed, even if it has already ended, and cancel it."""
        try:
            await self._dispatcher.fail_however_it_ended(generation.job, generation.attempt, code)
            await self._dispatcher.tell_to_stop(generation)
        except (redis.RedisError, OSError) as exc:
            log.warning("cancellation_failed", request_id=generation.request_id, error=str(exc))

    async def _end(self, call: ActiveRequest) -> None:
        """Cancel the execution, and hear what it used: so much is not given back."""
        try:
            coming = await self._dispatcher.cancel(call.generation) or call.generation.over
        except redis.RedisError as exc:
            log.warning("cancellation_failed", request_id=call.request_id, error=str(exc))
            coming = True
        try:
            async with asyncio.timeout(END_SECONDS if coming else 0):
                while not isinstance(event := await call.generation.next_event(), Failed):
                    if isinstance(event, End):
                        await self._record_usage(call, event.usage)
                        return
                    if isinstance(event, Tokens):
                        call.tokens_seen += len(event.token_ids)
        except TimeoutError:
            if call.tokens_seen:  # nobody told: what we saw was used at least
                call.usage = TokenUsage(uncached=len(call.prompt.ids), output=call.tokens_seen)

    def _count(self, model: str, usage: TokenUsage) -> None:
        for token_class in ("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output"):
            if tokens := getattr(usage, token_class):
                self._metrics.tokens.labels(model, token_class).inc(tokens)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _first(*events: asyncio.Event, seconds: float) -> bool:
    """Wait until one of the events is set or the time is over. Return whether one is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)
