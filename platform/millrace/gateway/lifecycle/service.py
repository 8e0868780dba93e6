"""The inference service: the lifecycle of a request, independent of its API dialect.

`begin` tokenizes the prompt, routes it to a candidate, admits it and dispatches an execution. `events` yields the
execution's events. If the execution fails before its first event, the next candidate is tried. `release` ends the
request: it cancels a running execution and closes the admission lease.
"""

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
from millrace.gateway.core.multi_prompt import merge_events, part_id, whole_id
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

RESUME_SECONDS = 30.0  # how long an execution continues without a reader, for a client that intends to return
POLL_SECONDS = 1.0
END_SECONDS = 30.0  # how long to wait for the end of a cancelled execution
LOCAL_FAILURES = ("stream_lost", "timeout")  # failures seen only by this gateway; the execution may have completed
# Failure -> condition in a routing policy. Other failures depend on the request and are the same for every model. A
# request that was lost with several workers (`not_served`) is not sent to another model, whose workers it could end.
FALLBACK = {
    OVERLOADED: "overload",
    "model_loading": "overload",
    "worker_lost": "error",
    "internal_error": "error",
    "context_length_exceeded": "context",
}


class ActiveRequest:
    """An admitted request with its current execution."""

    def __init__(
        self,
        key: ApiKeySnapshot,
        request: InferenceRequest,
        dialect: str,
        request_id: str,
        prompt: Prompt,
        counting_model: ServedModel,
        route: Route,
    ) -> None:
        self.key = key
        self.request = request
        self.dialect = dialect
        self.request_id = request_id
        self.prompt = prompt
        self.tokenizer = counting_model.tokenizer  # that the prompt is tokenized with
        self.route = route
        self.remaining_candidates = list(route.candidates)
        self.decision_record = route.decision_record
        self.admitted_at = time.time_ns() // 1000
        self.started_at = time.monotonic()
        self.further_prompts: list[ActiveRequest] = []  # one for each further prompt
        self.executions = 0
        self.usage: TokenUsage | None = None
        self.output_tokens = 0  # number of generated tokens, from the events
        self.first_token_at: float | None = None  # monotonic time of the first token
        self.completion_texts: dict[int, list[str]] = {}  # choice -> texts, if the tenant stores content
        # Set when the first execution starts.
        self.candidate: Candidate
        self.response_spec: ResponseSpec
        self.lease: AdmissionLease
        self.execution: DispatchedExecution

    @property
    def model(self) -> str:
        """Return the name of the current deployment."""
        return self.candidate.model.name

    def writer(self) -> Writer:
        return make_writer(self.response_spec, self.candidate.model.tokenizer)

    def may_fall_back(self, error: ApiError) -> bool:
        """Return whether another candidate may be tried after this failure."""
        return bool(self.remaining_candidates) and FALLBACK.get(error.code) in self.route.fallback_on

    def skip(self, error: ApiError) -> None:
        """Record why a candidate did not run the request."""
        self.decision_record.setdefault("skipped", []).append({"model": self.model, "reason": error.code})


class InferenceService:
    def __init__(
        self,
        router: Router,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        active_requests: ActiveRequests,
        subscribers: StreamSubscribers,
        jobs: InferenceJobBuilder,
        disk: DiskWatch,
    ) -> None:
        self._router = router
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._active_requests = active_requests
        self._subscribers = subscribers
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
        """Admit and dispatch the request. Its progress is recorded in `trace`.

        Raises:
            ApiError: the request is rejected, and nothing is reserved.
        """
        self._disk.require_space()
        active = await self._begin(key, request, dialect, request_id, trace)
        try:
            for number, prompt in enumerate(request.more_prompts, 1):
                part = dataclasses.replace(request, prompt=prompt, more_prompts=(), number=number)
                active.further_prompts.append(await self._begin(key, part, dialect, part_id(request_id, number), trace))
        except BaseException as exc:
            if isinstance(exc, Exception):  # otherwise the client has disconnected
                await self.mark_failed(active, exc.code if isinstance(exc, ApiError) else "internal_error")
            self.release(active)
            raise
        return active

    async def count(self, key: ApiKeySnapshot, request: InferenceRequest) -> int:
        """Count the tokens of the request's prompt.

        Raises:
            ApiError: the key may not use the model, or the prompt is invalid for the model.
        """
        return len((await self.tokenize(key, request)).ids)

    async def tokenize(self, key: ApiKeySnapshot, request: InferenceRequest) -> Prompt:
        """Return the request's prompt in the tokens of its model.

        Raises:
            ApiError: the key may not use the model, or the prompt is invalid for the model.
        """
        return await self._tokenize(self._router.measure(key, request.model), request)

    def events(self, active: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        """Return the response's events, ending with its end.

        Raises:
            ApiError: the request failed. Before the first event this can still be an HTTP status.
        """
        return merge_events(
            [self._events(part) for part in (active, *active.further_prompts)], active.request.sampling.n
        )

    def release(self, active: ActiveRequest, *, is_returning: bool = False) -> None:
        """Release the request after its end or its client's disconnect. Must be called once for every request."""
        for part in (active, *active.further_prompts):
            self._in_background(self._close(part, is_returning))

    async def mark_failed(self, active: ActiveRequest, code: str = "internal_error") -> None:
        """Mark the request as failed before an internal error is reported, so that it is never billed."""
        for part in (active, *active.further_prompts):
            await self._abandon(part.execution, code)

    async def drain(self) -> None:
        """Wait until all requests are cancelled or closed."""
        self._stopping.set()
        await asyncio.gather(*self._background, return_exceptions=True)

    # One prompt of a request.

    async def _begin(
        self, key: ApiKeySnapshot, request: InferenceRequest, dialect: str, request_id: str, trace: RequestTrace | None
    ) -> ActiveRequest:
        counting_model = self._router.measure(key, request.model)
        prompt = await self._tokenize(counting_model, request)
        route = self._router.route(
            key,
            request.model,
            request_id,
            len(prompt.ids),
            tools=bool(request.tools),
            schema=request.structured is not None,
        )
        decision_record = route.decision_record
        decision_record |= {name: value for name in ("metadata", "user") if (value := getattr(request, name))}
        active = ActiveRequest(key, request, dialect, request_id, prompt, counting_model, route)
        if trace is not None:
            trace.active_requests.append(active)
        await self._next_execution(active)
        return active

    async def _events(self, active: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        first = True
        while True:
            event = await active.execution.next_event()
            if isinstance(event, Failed):
                error = ApiError(event.code, event.message, event.param, retry_after=active.execution.retry_after)
                active.execution.ended = True
                if event.code in LOCAL_FAILURES:
                    await self._abandon(active.execution, event.code)
                if not (first and active.may_fall_back(error)):
                    raise error
                await self._fall_back(active, error)
                continue
            if first:
                first = False
                active.first_token_at = time.monotonic()
                self._metrics.time_to_first_token.labels(active.model).observe(
                    active.first_token_at - active.started_at
                )
            if isinstance(event, End):
                active.execution.ended = True
                await self._record_usage(active, event.usage)
                if event.finish_reason == "cancelled":
                    raise ApiError("cancelled", "The request was cancelled.")
            elif isinstance(event, Tokens):
                active.output_tokens += len(event.token_ids)
                if active.key.content_retention_days:
                    active.completion_texts.setdefault(event.index, []).append(event.text)
            yield event
            if isinstance(event, End):
                return

    async def _record_usage(self, active: ActiveRequest, usage: TokenUsage) -> None:
        """Record what the execution used, and release the rest of its reservation early."""
        active.usage = usage
        await self._admission.end(active.execution.job.billing_context, active.lease.grant, usage)

    def writer(self, response_spec: ResponseSpec) -> Writer:
        """Return a writer for a response that is resumed.

        Raises:
            ApiError: 404, its model is no longer served.
        """
        model = self._router.served(response_spec.model)
        if model is None:
            raise ApiError("not_found", f"The model {response_spec.model!r} of this request is no longer served.")
        return make_writer(response_spec, model.tokenizer)

    # Executions of one prompt.

    async def _next_execution(self, active: ActiveRequest) -> None:
        """Start an execution with the next candidate that can run it.

        Raises:
            ApiError: no candidate can run it.
        """
        while True:
            active.candidate = active.remaining_candidates.pop(0)
            try:
                return await self._begin_execution(active)
            except ApiError as exc:
                if not active.may_fall_back(exc):
                    raise
                active.skip(exc)

    async def _tokenize(self, model: ServedModel, request: InferenceRequest) -> Prompt:
        """Return the prompt in the model's tokens.

        Prompts that are tokenized on the event loop are separated by an iteration of the loop.

        Raises:
            ApiError: 400, the prompt is invalid for the model.
        """
        if request.tokenized is not None:
            return await tokenize(model, request)
        async with self._tokenizing:
            prompt = await tokenize(model, request)
            await asyncio.sleep(0)
            return prompt

    async def _begin_execution(self, active: ActiveRequest) -> None:
        key, model = active.key, active.candidate.model
        if model.tokenizer is not active.tokenizer:
            active.prompt, active.tokenizer = await self._tokenize(model, active.request), model.tokenizer
        batch = active.request.service_class == ServiceClass.BATCH
        self._dispatcher.require_capacity(model.name, key.tenant_id, key.weight, batch=batch)
        demand = AdmissionRequest(
            active.request_id,
            active.admitted_at,
            key,
            active.request.model,
            [active.candidate, *active.remaining_candidates],
            len(active.prompt.ids),
            active.request.max_tokens,
            0 if active.prompt.input_lengths else active.request.sampling.n,
            active.request.prompt_param,
            writes_5m=any(breakpoint.seconds == 300 for breakpoint in active.prompt.breakpoints),
            writes_1h=any(breakpoint.seconds == 3600 for breakpoint in active.prompt.breakpoints),
            service_class=active.request.service_class,
            charged=active.request.charged,
        )
        echo = await self._echo(model, active) if active.request.echo else None
        lease = await self._admission.admit(demand)
        billing_context = self._jobs.billing_context(demand, lease.grant, execution=active.executions)
        try:
            dispatch_request = self._dispatch_request(active, demand, lease, billing_context, echo)
            active.execution = self._dispatcher.submit(dispatch_request)
        except BaseException:
            await self._dispatcher.record_not_started(billing_context)
            await lease.close(None)
            raise
        active.lease = lease
        active.executions += 1
        self._metrics.in_flight.set(self._dispatcher.in_flight)

    async def _echo(self, model: ServedModel, active: ActiveRequest) -> list[list[int]]:
        """Return the tokens of all prompts, for completions that begin with them."""
        further_prompts = enumerate(active.request.more_prompts, 1)
        others = [
            dataclasses.replace(active.request, prompt=prompt, number=number) for number, prompt in further_prompts
        ]
        return [active.prompt.ids, *[(await self._tokenize(model, other)).ids for other in others]]

    def _dispatch_request(
        self,
        active: ActiveRequest,
        demand: AdmissionRequest,
        lease: AdmissionLease,
        billing_context: BillingContext,
        echo: list[list[int]] | None,
    ) -> DispatchRequest:
        request = active.request
        active.response_spec = ResponseSpec(
            active.dialect,
            active.request_id,
            active.model,
            active.admitted_at // 1_000_000,
            len(active.prompt.ids),
            request.include_usage,
            request.continuous_usage,
            request.service_class,
            request.sampling.n,
            1 + len(request.more_prompts),
            [tool.name for tool in request.tools] if request.tool_choice != "none" else [],
            echo,
            request.echoed_parameters,
        )
        return DispatchRequest(
            job=self._jobs.make(billing_context, demand, lease.grant, request, active.prompt),
            response_spec=encode_response_spec(active.response_spec),
            weight=active.key.weight,
            long=is_long(demand.limit_sets, len(active.prompt.ids)),
            first_attempt=active.execution.attempt + 1 if active.executions else 1,
            decision_record=active.decision_record,
        )

    async def _fall_back(self, active: ActiveRequest, error: ApiError) -> None:
        """Start an execution with the next candidate, after a failure before the first token."""
        log.info("fallback_started", request_id=active.request_id, model=active.model, code=error.code)
        active.skip(error)
        self._dispatcher.release(active.execution)
        await active.lease.close(None)
        try:
            await self._next_execution(active)
        except ApiError:
            raise error from None  # report the first failure

    # End of a request.

    async def _close(self, active: ActiveRequest, is_returning: bool) -> None:
        execution = active.execution
        try:
            if not execution.ended:
                if is_returning and not await self._wait_for_return(active):
                    return  # the execution continues; only its concurrency slots expire
                await self._end(active)
            await active.lease.close(active.usage)
        finally:
            self._dispatcher.release(execution)
            self._metrics.in_flight.set(self._dispatcher.in_flight)
            if active.usage is not None:
                self._count(active.model, active.usage)

    async def _wait_for_return(self, active: ActiveRequest) -> bool:
        """Let the execution continue for a while without a reader, and as long as it has subscribers.

        Returns:
            False if this gateway stops. The execution continues for clients that resume it at another gateway.
        """
        key_revoked = asyncio.Event()
        with self._active_requests.registered(active.key, lambda _: key_revoked.set()):
            request_id = whole_id(active.request_id)
            await self._subscribers.record_client_left(request_id)
            unread_seconds = 0.0
            while unread_seconds < RESUME_SECONDS and not active.execution.is_finished and not key_revoked.is_set():
                if self._stopping.is_set():
                    return False
                await _first(key_revoked, self._stopping, seconds=POLL_SECONDS)
                unread_seconds = 0.0 if await self._subscribers.has_any(request_id) else unread_seconds + POLL_SECONDS
        return True

    async def _abandon(self, execution: DispatchedExecution, code: str) -> None:
        """Mark the execution as failed, even if it has already ended, and cancel it."""
        try:
            await self._dispatcher.force_fail(execution.job, execution.attempt, code)
            await self._dispatcher.send_stop(execution)
        except (redis.RedisError, OSError) as exc:
            log.warning("cancellation_failed", request_id=execution.request_id, error=str(exc))

    async def _end(self, active: ActiveRequest) -> None:
        """Cancel the execution and wait for its usage, which is not refunded."""
        try:
            end_expected = await self._dispatcher.cancel(active.execution) or active.execution.is_finished
        except redis.RedisError as exc:
            log.warning("cancellation_failed", request_id=active.request_id, error=str(exc))
            end_expected = True
        try:
            async with asyncio.timeout(END_SECONDS if end_expected else 0):
                while not isinstance(event := await active.execution.next_event(), Failed):
                    if isinstance(event, End):
                        await self._record_usage(active, event.usage)
                        return
                    if isinstance(event, Tokens):
                        active.output_tokens += len(event.token_ids)
        except TimeoutError:
            if active.output_tokens:  # no end was received; the observed tokens are the minimum
                active.usage = TokenUsage(uncached=len(active.prompt.ids), output=active.output_tokens)

    def _count(self, model: str, usage: TokenUsage) -> None:
        for token_class in ("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output"):
            if tokens := getattr(usage, token_class):
                self._metrics.tokens.labels(model, token_class).inc(tokens)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _first(*events: asyncio.Event, seconds: float) -> bool:
    """Wait until one of the events is set or the time has passed. Return whether one is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)
