"""The inference service: the lifecycle of a request, independent of its API dialect.

`begin` tokenizes the prompt, routes it to a candidate, admits it and dispatches an execution. `events` yields the
execution's events. If the execution fails before its first event, the next candidate is tried. If a complete answer
fails a check of the routing policy, the next candidate answers (escalation.py). `release` ends the request: it cancels
a running execution and closes the admission lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Coroutine

import msgspec
import structlog

from inference_worker.contract.messages import AnswerEvent, End, Failed, Tokens
from inference_worker.contract.request import TOKEN_CLASSES, ServiceClass, TokenCounts
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest, RateLimitAdmission
from millrace.gateway.admission.budget_shares import BudgetShares
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.answer_cache.answer_cache import AnswerCache
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.multi_prompt import merge_events, part_id, whole_id
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec, Writer
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_ends import ExecutionEnds
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.dispatch.streams import LOCAL_FAILURES, LogEvent
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.answer_checks import failed_check
from millrace.gateway.lifecycle.escalation import EscalationReserves
from millrace.gateway.lifecycle.request_log import RequestTrace
from millrace.gateway.lifecycle.routing_facts import request_size, routing_facts
from millrace.gateway.lifecycle.semantic_checks import SemanticChecks
from millrace.gateway.lifecycle.shadows import Shadows
from millrace.gateway.lifecycle.summaries import Summaries, with_prompt
from millrace.gateway.protocols import context_overflow
from millrace.gateway.protocols.answer_validity import checked_events
from millrace.gateway.protocols.prompts import is_short, make_prompt, tokenize
from millrace.gateway.protocols.tools import call_fields
from millrace.gateway.protocols.upstreams.images import has_images
from millrace.gateway.protocols.writers import make_writer
from millrace.gateway.routing.retry_budgets import RetryBudgets
from millrace.gateway.routing.router import Router
from millrace.gateway.routing.signals import LatencyTracker
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

RESUME_SECONDS = 30.0  # how long an execution continues without a reader, for a client that intends to return
POLL_SECONDS = 1.0


class InferenceService:
    def __init__(
        self,
        router: Router,
        admission: RateLimitAdmission,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        active_requests: ActiveRequests,
        subscribers: StreamSubscribers,
        jobs: InferenceJobBuilder,
        answers: AnswerCache,
        disk: DiskWatch,
        latencies: LatencyTracker | None = None,
        budget_shares: BudgetShares | None = None,
        semantic_checks: SemanticChecks | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self._router = router
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._active_requests = active_requests
        self._subscribers = subscribers
        self._jobs = jobs
        self._answers = answers
        self._disk = disk
        self._latencies = latencies or LatencyTracker()
        self._budget_shares = budget_shares
        self._semantic_checks = semantic_checks
        self._shadows = shadows
        self._retry_budgets = RetryBudgets()
        self._reserves = EscalationReserves(admission, dispatcher, self._tokenize)
        self._ends = ExecutionEnds(admission, dispatcher)
        self._summaries = Summaries(router, admission, dispatcher, jobs, self._reserves, self._ends)
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
        return (await self.tokenize(key, request)).expected_tokens

    async def tokenize(self, key: ApiKeySnapshot, request: InferenceRequest) -> Prompt:
        """Return the request's prompt in the tokens of its model.

        Raises:
            ApiError: the key may not use the model, or the prompt is invalid for the model.
        """
        model = self._router.measure(key, request.model, has_images=has_images(request))
        return await self._tokenize(model, request)

    def events(self, active: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        """Return the response's events, ending with its end.

        Raises:
            ApiError: the request failed. Before the first event this can still be an HTTP status.
        """
        events = merge_events(
            [self._events(part) for part in (active, *active.further_prompts)], active.request.sampling.n
        )
        return events if active.request.checked is None else checked_events(events, active.response_spec)

    def release(self, active: ActiveRequest, *, is_returning: bool = False) -> None:
        """Release the request after its end or its client's disconnect. Must be called once for every request."""
        for part in (active, *active.further_prompts):
            self._in_background(self._close(part, is_returning))

    async def mark_failed(self, active: ActiveRequest, code: str = "internal_error") -> None:
        """Mark the request as failed before an internal error is reported, so that it is never billed."""
        for part in (active, *active.further_prompts):
            for execution in (*part.summaries, *part.executions):
                if execution is part.execution or execution.usage is not None:
                    await self._ends.end(execution, code)
            if part.question is not None:
                await self._answers.discard(part.question)

    async def drain(self) -> None:
        """Wait until all requests are cancelled or closed."""
        self._stopping.set()
        if self._semantic_checks is not None:
            await self._semantic_checks.stop()
        if self._shadows is not None:
            await self._shadows.stop()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._answers.stop()

    # One prompt of a request.

    async def _begin(
        self, key: ApiKeySnapshot, request: InferenceRequest, dialect: str, request_id: str, trace: RequestTrace | None
    ) -> ActiveRequest:
        counting_model = self._router.measure(key, request.model, has_images=has_images(request))
        question = self._answers.begin(key, request, request_id)  # its vector is computed meanwhile
        try:
            prompt = await self._tokenize(counting_model, request)
            if request.reasoning.names and counting_model.tokenizer.reasoning_format is not None:
                ignored = tuple(name for name in request.ignored if name not in request.reasoning.names)
                request = dataclasses.replace(request, ignored=ignored)
            facts = await routing_facts(key, request, request_id, prompt, self._budget_shares)
            route = self._router.route(key, request.model, facts, request_size(key, request, prompt, facts))
            route = self._router.assign_arm(key, request, route)
            if route.policy is not None:
                self._retry_budgets.record_request((key.tenant_id, request.model))
            decision_record = route.decision_record
            decision_record |= {name: value for name in ("metadata", "user") if (value := getattr(request, name))}
            active = ActiveRequest(
                key, request, dialect, request_id, prompt, counting_model, route, self._retry_budgets
            )
            active.question = question
            if trace is not None:
                trace.active_requests.append(active)
            await self._next_execution(active)
            return active
        except BaseException:
            if question is not None:
                self._in_background(self._answers.discard(question))
            raise

    async def _events(self, active: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        if active.escalates:
            for event in await self._checked_events(active):
                if active.shadowed is not None:
                    active.shadowed.add(event)
                yield event
            return
        async for event in self._execution_events(active):
            if isinstance(event, End):
                self._store_answer(active)
            if active.shadowed is not None:
                active.shadowed.add(event)
            yield event

    async def _checked_events(self, active: ActiveRequest) -> list[AnswerEvent]:
        """Return the events of the first answer that passes the checks of the routing policy, or else of the last."""
        answered: tuple[Execution, list[AnswerEvent]] | None = None
        while True:
            try:
                events = [event async for event in self._execution_events(active)]
            except ApiError as exc:
                if answered is None:
                    raise
                active.skip(exc)
                await self._ends.end(active.execution)
                break
            answered = active.execution, events
            escalation = active.route.escalation if active.escalates else None
            spec = active.execution.response_spec
            check = None if escalation is None else await failed_check(escalation, active.request, spec, events)
            if check is None:
                self._store_answer(active)
                break
            await self._answers.end_flight(active.execution)
            if not await self._escalate(active, check):
                break
        await self._reserves.release(active)
        if "escalations" in active.decision_record:
            await self._dispatcher.record_decisions(active.execution)
        execution, events = answered
        if execution is not active.execution:
            active.make_current(execution)
        return events

    def _store_answer(self, active: ActiveRequest) -> None:
        """Store a computed answer, or have a semantic hit checked if it was chosen."""
        execution, question = active.execution, active.question
        self._in_background(self._answers.store(execution, question))
        if question is not None and question.is_verified and self._semantic_checks is not None:
            self._semantic_checks.start(execution, question)

    async def _escalate(self, active: ActiveRequest, check: str) -> bool:
        """Start the execution that is reserved next. Return False if there is none, or it cannot start."""
        entry = {"model": active.model, "check": check}
        active.decision_record.setdefault("escalations", []).append(entry)
        if not active.reserved:
            entry["reason"] = "no target left"
            return False
        execution, reserved = active.execution, active.reserved.pop(0)
        active.escalations += 1
        await self._ends.end(execution)
        log.info("escalation_started", request_id=active.request_id, model=active.model, check=check)
        try:
            await self._begin_reserved(active, reserved)
        except ApiError as exc:
            active.skip(exc)
            active.make_current(execution)
            return False
        return True

    async def _execution_events(self, active: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        while True:
            execution = active.execution
            next_event = await self._next_event(active)
            if next_event is None:
                continue
            if execution.answer is not None and not isinstance(next_event, Failed):
                try:
                    accepted = execution.answer.accept(next_event)
                except ApiError as exc:
                    await self._ends.end(execution, exc.code)
                    raise
                if accepted is None:
                    continue
                next_event = accepted
            event = next_event
            is_first = execution.first_token_at is None
            if isinstance(event, Failed):
                retry_after = execution.retry_after if event.retry_after is None else event.retry_after
                error = ApiError(event.code, event.message, event.param, retry_after=retry_after)
                if event.code in LOCAL_FAILURES:
                    await self._ends.end(execution, event.code)
                if not (is_first and active.take_fallback(error)):
                    raise error
                await self._fall_back(active, error)
                continue
            if is_first:
                execution.first_token_at = time.monotonic()
                self._metrics.time_to_first_token.labels(execution.model).observe(
                    execution.first_token_at - active.started_at
                )
                if not execution.batch and (execution.answer is None or not execution.answer.layer):
                    self._latencies.record(execution.model, execution.first_token_at - execution.created_at)
            if isinstance(event, End):
                execution.completed_at, execution.finish_reason = time.monotonic(), event.finish_reason
                hit_usage = None if execution.answer is None else execution.answer.usage
                await self._ends.record_usage(execution, hit_usage or event.usage)
                if event.finish_reason == "cancelled":
                    raise ApiError("cancelled", "The request was cancelled.")
            elif isinstance(event, Tokens):
                execution.output_tokens += len(event.token_ids)
                execution.add_calls(event)
                if active.key.content_retention_days:
                    execution.completion_texts.setdefault(event.index, []).append(event.text)
            yield event
            if isinstance(event, End):
                return

    async def _next_event(self, active: ActiveRequest) -> LogEvent | None:
        """Return the next event of the current execution; None if it was replaced, since its first token took too long.

        Raises:
            ApiError: no other candidate can run the request.
        """
        execution, seconds = active.execution, active.first_token_seconds
        if execution.first_token_at is not None or seconds is None:
            return await execution.next_event()
        try:
            async with asyncio.timeout(max(0.0, execution.created_at + seconds - time.monotonic())):
                return await execution.next_event()
        except TimeoutError:
            message = f"The model {execution.model!r} sent no token within {seconds:g} seconds. Retry later."
            error = ApiError("first_token_timeout", message)
        if not active.take_fallback(error):
            execution.buffer.refill()  # the wait was cancelled, possibly while it read the log
            return await execution.next_event()
        await self._ends.end(execution, error.code)
        await self._fall_back(active, error)
        return None

    def writer(self, response_spec: ResponseSpec) -> Writer:
        """Return a writer for a response that is resumed.

        Raises:
            ApiError: 404, its model is no longer served.
        """
        model = self._router.find_served(response_spec.model)
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
            candidate = active.remaining_candidates.pop(0)
            active.target = self._router.find_served(candidate.name) or candidate  # the current version
            try:
                return await self._begin_execution(active, active.target)
            except ApiError as exc:
                if not active.take_fallback(exc):
                    raise
                active.skip(exc)

    async def _tokenize(self, model: ServedModel, request: InferenceRequest) -> Prompt:
        """Return the prompt in the model's tokens.

        Prompts that are tokenized on the event loop are separated by an iteration of the loop, unless they are short.

        Raises:
            ApiError: 400, the prompt is invalid for the model.
        """
        if request.tokenized is not None or is_short(request):
            return await tokenize(model, request)
        async with self._tokenizing:  # not while a prompt process works
            await asyncio.sleep(0)
        return await tokenize(model, request)

    async def _begin_execution(self, active: ActiveRequest, model: ServedModel) -> None:
        key, request = active.key, active.request
        await self._reserves.release(active)
        if model.tokenization != active.tokenization:
            active.prompt, active.tokenization = await self._tokenize(model, request), model.tokenization
        whole_prompt = active.prompt.ids
        summarizes = await self._shorten(active, model)
        batch = request.service_class == ServiceClass.BATCH
        rejection: ApiError | None = None
        try:
            self._dispatcher.require_capacity(model.key, key.tenant_id, key.weight, batch=batch)
        except ApiError as exc:
            if not key.answer_cache_seconds:
                raise
            rejection = exc  # the answer may be cached
        demand = AdmissionRequest(
            active.request_id,
            active.admitted_at,
            key,
            request,
            active.prompt,
            [model, *active.remaining_candidates],
            len(active.executions),
        )
        needs_prompts = request.echo or (request.more_prompts and request.sampling.logprobs is not None)
        prompts = await self._prompt_ids(model, active) if needs_prompts else None
        admitted = await self._admit_with_room(active, demand) if summarizes else None
        summarized_prompt = None if admitted is None else whole_prompt
        if admitted is None:
            admitted = await self._admission.admit(demand)
        await self._start(active, admitted, prompts, rejection, reserves=True, summarized_prompt=summarized_prompt)

    async def _admit_with_room(self, active: ActiveRequest, demand: AdmissionRequest) -> AdmittedRequest | None:
        """Admit a prompt with room for a summary of its dropped messages. Return None if that does not fit a limit."""
        prompt = _with_room(active.prompt, context_overflow.SUMMARY_ROOM)
        try:
            return await self._admission.admit(msgspec.structs.replace(demand, prompt=prompt))
        except ApiError as exc:
            active.decision_record["not_summarizing"] = exc.code
            return None

    async def _shorten(self, active: ActiveRequest, model: ServedModel) -> bool:
        """Drop messages of a conversation that outgrows the context of the last candidate, if the policy says so.

        Returns:
            Whether a summary of these messages is to be created.

        Raises:
            ApiError: 400, it cannot be shortened enough.
        """
        policy, request = active.route.policy, active.request
        if policy is None or policy.context_overflow == "refuse" or active.falls_back("context"):
            return False
        room = model.context_length - context_overflow.output_room(model, request)
        if active.prompt.num_tokens <= room or room < 1 or not context_overflow.can_shorten(model, request):
            return False
        if active.summary or self._summaries.model_of(active) is None:
            active.prompt = await self._shorten_prompt(active, model, room)
            return False
        try:
            active.prompt = await self._shorten_prompt(active, model, room - context_overflow.SUMMARY_ROOM)
        except ApiError as exc:  # the last message leaves no room for a summary
            active.decision_record["not_summarizing"] = exc.code
            active.prompt = await self._shorten_prompt(active, model, room)
            return False
        return True

    async def _shorten_prompt(self, active: ActiveRequest, model: ServedModel, room: int) -> Prompt:
        request = active.request
        summary = active.summary
        prompt = await make_prompt(
            model,
            request,
            lambda: context_overflow.shorten_prompt(model, request, room, summary),
            lambda prompts: prompts.shorten(model, request.number, room, summary),
        )
        active.decision_record["dropped_messages"] = prompt.dropped_messages
        return prompt

    async def _run_summarized(
        self, active: ActiveRequest, admitted: AdmittedRequest, execution: Execution, prompts: list[list[int]] | None
    ) -> Execution:
        """Return the execution of the prompt with a summary of its dropped messages, or without one if that fails.

        Args:
            admitted: with room for the summary.
            execution: of the prompt without the summary, whose answer is not cached.
        """
        model, summarizer, room_prompt = admitted.demand.model, self._summaries.model_of(active), admitted.demand.prompt
        is_summarized = False
        if summarizer is not None:
            dropped = active.prompt.dropped_messages
            active.summary = await self._summaries.summarize(active, summarizer, dropped)
        if active.summary:
            with contextlib.suppress(ApiError):  # the summary is longer than its room
                active.prompt = await self._shorten_prompt(active, model, room_prompt.num_tokens)
                is_summarized = True
        active.reserved = [
            with_prompt(each, active.prompt) if each.demand.prompt is room_prompt else each for each in active.reserved
        ]
        summarized = self._execution(active, with_prompt(admitted, active.prompt), prompts)
        summarized.answer, summarized.whole_prompt = execution.answer, execution.whole_prompt
        if summarized.answer is not None and not is_summarized:
            summarized.answer.seconds = 0  # later requests get an answer with a summary
        return summarized

    async def _begin_reserved(self, active: ActiveRequest, reserved: AdmittedRequest) -> None:
        """Start an execution whose cost is reserved.

        Raises:
            ApiError: it cannot start. Its reservation is returned.
        """
        key, model = active.key, reserved.demand.model
        batch = active.request.service_class == ServiceClass.BATCH
        try:
            self._dispatcher.require_capacity(model.key, key.tenant_id, key.weight, batch=batch)
            admitted = await self._admission.admit_reserved(reserved)
        except BaseException:
            await self._reserves.return_one(reserved)
            raise
        active.remaining_candidates = [each for each in active.remaining_candidates if each.name != model.name]
        active.target, active.prompt, active.tokenization = model, reserved.demand.prompt, model.tokenization
        await self._start(active, admitted)

    async def _start(
        self,
        active: ActiveRequest,
        admitted: AdmittedRequest,
        prompts: list[list[int]] | None = None,
        rejection: ApiError | None = None,
        *,
        reserves: bool = False,
        summarized_prompt: list[int] | None = None,
    ) -> None:
        """Serve an admitted execution from the answer cache or dispatch it, unless there is a rejection.

        Args:
            prompts: the tokens of all prompts, if the response needs more than those of the first.
            reserves: whether the escalations that may follow are reserved first.
            summarized_prompt: the whole prompt, if a part of it is summarized before the execution is dispatched.

        Raises:
            ApiError: it cannot run, and nothing is reserved.
        """
        request, key, execution = active.request, active.key, None
        try:
            if reserves:
                await self._reserves.reserve(active, admitted)
            asked = admitted if summarized_prompt is None else with_prompt(admitted, active.prompt)
            execution = self._execution(active, asked, prompts)
            execution.whole_prompt = summarized_prompt
            if not await self._answers.serve(execution, request, key, active.question):
                if rejection is not None:
                    raise rejection
                if summarized_prompt is not None:
                    execution = await self._run_summarized(active, admitted, execution, prompts)
                self._dispatcher.submit(execution)
                if reserves and not active.executions and self._shadows is not None:
                    active.shadowed = self._shadows.start(active, execution, self._tokenize)
        except BaseException:
            if execution is not None:
                await self._answers.end_flight(execution)
            await self._ends.drop(admitted)
            if reserves:
                await self._reserves.release(active)
            raise
        active.executions.append(execution)
        self._metrics.in_flight.set(self._dispatcher.in_flight)

    async def _prompt_ids(self, model: ServedModel, active: ActiveRequest) -> list[list[int]]:
        """Return the tokens of all prompts."""
        further_prompts = enumerate(active.request.more_prompts, 1)
        others = [
            dataclasses.replace(active.request, prompt=prompt, number=number) for number, prompt in further_prompts
        ]
        return [active.prompt.ids, *[(await self._tokenize(model, other)).ids for other in others]]

    def _execution(
        self, active: ActiveRequest, admitted: AdmittedRequest, prompts: list[list[int]] | None
    ) -> Execution:
        request = active.request
        active.decision_record.pop("sampling_defaults", None)  # those of a model that failed
        if defaults := request.defaults_of(admitted.demand.model):
            active.decision_record["sampling_defaults"] = defaults
        if active.prompt.truncated_inputs:
            active.decision_record["truncated_inputs"] = active.prompt.truncated_inputs
        response_spec = ResponseSpec(
            active.dialect,
            active.request_id,
            active.model,
            active.admitted_at // 1_000_000,
            active.prompt.expected_tokens,
            request.include_usage,
            request.continuous_usage,
            request.service_class,
            request.sampling.n,
            1 + len(request.more_prompts),
            echo=prompts if request.echo else None,
            echoed_parameters=request.echoed_parameters
            | {name: value for name, value in defaults.items() if name in request.echoed_parameters},
            checked=request.checked,
            truncated=active.prompt.truncated,
            last_prompt_ids=[ids[-1] if ids else None for ids in prompts or [active.prompt.ids]],
            shows_special_tokens=not request.sampling.skip_special_tokens,
            **call_fields(request, admitted.demand.model),
        )
        return Execution(
            self._dispatcher.broker,
            admitted,
            self._jobs.make(admitted, waits_for_capacity=not active.falls_back("overload")),
            response_spec,
            active.decision_record,
            active.execution.attempt + 1 if active.executions else 1,
        )

    async def _fall_back(self, active: ActiveRequest, error: ApiError) -> None:
        """Start an execution with the next candidate, after a failure before the first token."""
        log.info("fallback_started", request_id=active.request_id, model=active.model, code=error.code)
        active.skip(error)
        await self._ends.end(active.execution)
        try:
            await self._next_execution(active)
        except ApiError:
            raise error from None  # report the first failure

    # End of a request.

    async def _close(self, active: ActiveRequest, is_returning: bool) -> None:
        execution = active.execution
        if active.shadowed is not None:
            active.shadowed.close()
        is_served = execution.answer is not None and execution.answer.layer  # no gateway can resume it
        is_awaited = is_returning and not is_served and not execution.is_read and not execution.is_closed
        try:
            is_left = is_awaited and not await self._wait_for_return(active)
            await self._ends.end(execution, is_continued=is_left)
        finally:
            await self._reserves.release(active)
            self._metrics.in_flight.set(self._dispatcher.in_flight)
            for each in (*active.summaries, *active.executions):
                if each.usage is not None:
                    self._count(each.model, each.usage)
                    self._metrics.answers.labels(each.model, each.cache_layer).inc()

    async def _wait_for_return(self, active: ActiveRequest) -> bool:
        """Let the execution continue for a while without a reader, and as long as it has subscribers.

        Returns:
            False if this gateway stops. The execution continues for clients that resume it at another gateway.
        """
        key_revoked = asyncio.Event()
        with self._active_requests.register(active.key, lambda _: key_revoked.set()):
            request_id = whole_id(active.request_id)
            await self._subscribers.record_client_left(request_id)
            unread_seconds = 0.0
            while unread_seconds < RESUME_SECONDS and not active.execution.is_finished and not key_revoked.is_set():
                if self._stopping.is_set():
                    return False
                await _wait_for_first(key_revoked, self._stopping, seconds=POLL_SECONDS)
                unread_seconds = 0.0 if await self._subscribers.has_any(request_id) else unread_seconds + POLL_SECONDS
        return True

    def _count(self, model: str, usage: TokenCounts) -> None:
        for token_class in TOKEN_CLASSES:
            if tokens := getattr(usage, token_class):
                self._metrics.tokens.labels(model, token_class).inc(tokens)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _with_room(prompt: Prompt, tokens: int) -> Prompt:
    """Return a prompt with placeholders for a summary, for the reservation."""
    return dataclasses.replace(prompt, ids=prompt.ids + prompt.ids[-1:] * tokens)


async def _wait_for_first(*events: asyncio.Event, seconds: float) -> bool:
    """Wait until one of the events is set or the time has passed. Return whether one is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)
