"""The inference service: the lifecycle of a request, independent of its API dialect.

`begin` tokenizes the prompt, routes it to a candidate, admits it and dispatches an execution. `events` yields the
execution's events. If the execution fails before its first event, the next candidate is tried. `release` ends the
request: it cancels a running execution and closes the admission lease. On its way, a request passes through the stages
that its key and the settings enable (stage.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

import structlog

from inference_worker.contract.messages import AnswerEvent, End, Failed, Tokens
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.core.asyncio_utils import BackgroundTasks
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.multi_prompt import merge_events, part_id
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec, Writer
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.streams import LOCAL_FAILURES, LogEvent
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.answer_metrics import AnswerMetrics
from millrace.gateway.lifecycle.client_return import ClientReturn
from millrace.gateway.lifecycle.execution_starter import ExecutionStarter
from millrace.gateway.lifecycle.request_log import RequestTrace
from millrace.gateway.lifecycle.request_routing import RequestRouting
from millrace.gateway.lifecycle.stage import LAST, RequestStages, StageEvent, Stages
from millrace.gateway.protocols.answer_validity import checked_events
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)


class InferenceService:
    def __init__(
        self,
        routing: RequestRouting,
        dispatcher: Dispatcher,
        starter: ExecutionStarter,
        stages: Stages,
        client_return: ClientReturn,
        metrics: AnswerMetrics,
        disk: DiskWatch,
        background: BackgroundTasks,
    ) -> None:
        """Create a service. `background` is shared with the stages."""
        self._routing = routing
        self._dispatcher = dispatcher
        self._starter = starter
        self._ends = starter.ends
        self._stages = stages
        self._client_return = client_return
        self._metrics = metrics
        self._disk = disk
        self._background = background

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
            for number in range(1, 1 + len(request.more_prompts)):
                part = request.select_prompt(number)
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
        return await self._routing.tokenizer.tokenize(self._routing.measure(key, request), request)

    def events(self, active: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        """Return the response's events, ending with its end.

        Raises:
            ApiError: the request failed. Before the first event this can still be an HTTP status.
        """
        parts = (active, *active.further_prompts)
        streams = [self._staged_events(part) if part.stages.has_events else self._events(part) for part in parts]
        events = merge_events(streams, active.request.sampling.n)
        return events if active.request.analysis.checked is None else checked_events(events, active.response_spec)

    def writer(self, response_spec: ResponseSpec) -> Writer:
        """Return a writer for a response that is resumed.

        Raises:
            ApiError: 404, its model is no longer served.
        """
        return self._routing.make_writer(response_spec)

    def release(self, active: ActiveRequest, *, is_returning: bool = False) -> None:
        """Release the request after its end or its client's disconnect. Must be called once for every request."""
        for part in (active, *active.further_prompts):
            self._background.start(self._close(part, is_returning))

    async def mark_failed(self, active: ActiveRequest, code: str = "internal_error") -> None:
        """Mark the request as failed before an internal error is reported, so that it is never billed."""
        for part in (active, *active.further_prompts):
            for execution in part.executions:
                if execution is part.execution or execution.usage is not None:
                    await self._ends.end(execution, code)
            await self._discard_side_executions(part, code)
            await part.stages.close(is_billed=False)

    async def drain(self) -> None:
        """Wait until all requests are cancelled or closed."""
        self._client_return.stop()
        await self._stages.stop()
        await self._background.wait()

    # One prompt of a request.

    async def _begin(
        self, key: ApiKeySnapshot, request: InferenceRequest, dialect: str, request_id: str, trace: RequestTrace | None
    ) -> ActiveRequest:
        routing = self._routing
        counting_model = routing.measure(key, request)
        stages = self._stages.open(key, request, request_id)
        active: ActiveRequest | None = None
        try:
            prompt = await routing.tokenizer.tokenize(counting_model, request)
            if request.reasoning.names and counting_model.tokenizer.reasoning_format is not None:
                ignored = tuple(name for name in request.analysis.ignored if name not in request.reasoning.names)
                request = request.change_analysis(ignored=ignored)
            route = await routing.route(key, request, request_id, prompt)
            active = ActiveRequest(
                key, request, dialect, request_id, prompt, counting_model, route, routing.retry_budgets, stages
            )
            if trace is not None:
                trace.active_requests.append(active)
            await self._next_execution(active)
            return active
        except BaseException:
            if not stages.is_empty:
                self._background.start(self._close_rejected(stages, active))
            raise

    async def _next_execution(self, active: ActiveRequest) -> None:
        """Start an execution with the next candidate that can run it.

        Raises:
            ApiError: no candidate can run it.
        """
        while True:
            active.target = self._routing.find_current(active.remaining_candidates.pop(0))
            try:
                await self._starter.admit_and_start(active)
            except ApiError as exc:
                if not active.take_fallback(exc):
                    raise
                active.skip(exc)
            else:
                self._metrics.count_in_flight(self._dispatcher)
                return

    async def _fall_back(self, active: ActiveRequest, error: ApiError) -> None:
        """Start an execution with the next candidate, after a failure before the first token."""
        log.info("fallback_started", request_id=active.request_id, model=active.model, code=error.code)
        active.skip(error)
        await self._ends.end(active.execution)
        try:
            await self._next_execution(active)
        except ApiError:
            raise error from None  # report the first failure

    # Its events.

    async def _staged_events(self, active: ActiveRequest) -> AsyncIterator[AnswerEvent]:
        """Yield the events that the stages pass on. A stage may start another execution, whose events follow."""
        stages = active.stages
        while True:
            async with contextlib.aclosing(self._events(active)) as events:
                event: StageEvent | None = None
                while not isinstance(event, LAST):
                    try:
                        event = await anext(events)
                    except ApiError as exc:
                        event = exc
                    if not (stages.see_tokens or isinstance(event, LAST)):
                        yield event
                        continue
                    for passed in await stages.on_event(active, event):
                        if isinstance(passed, ApiError):
                            raise passed
                        yield passed
                        if isinstance(passed, End):
                            return

    async def _events(self, active: ActiveRequest) -> AsyncGenerator[AnswerEvent]:
        """Yield the events of the current execution, or of those that replace it before its first token.

        Raises:
            ApiError: it has failed.
        """
        while True:
            execution = active.execution
            is_first = execution.first_token_at is None
            next_event = await (self._first_event(active) if is_first else execution.next_event())
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
                self._metrics.record_first_token(active, execution)
            if isinstance(event, End):
                await self._end_answer(execution, event)
            elif isinstance(event, Tokens):
                execution.output_tokens += len(event.token_ids)
                execution.add_calls(event)
                if active.key.content_retention_days:
                    execution.completion_texts.setdefault(event.index, []).append(event.text)
            yield event
            if isinstance(event, End):
                return

    async def _end_answer(self, execution: Execution, end: End) -> None:
        """Record the end of an answer.

        Raises:
            ApiError: it was cancelled.
        """
        execution.completed_at, execution.finish_reason = time.monotonic(), end.finish_reason
        hit_usage = None if execution.answer is None else execution.answer.usage
        await self._ends.record_usage(execution, hit_usage or end.usage)
        if end.finish_reason == "cancelled":
            raise ApiError("cancelled", "The request was cancelled.")

    async def _first_event(self, active: ActiveRequest) -> LogEvent | None:
        """Return the current execution's first event; None if it was replaced, since its first token took too long.

        Raises:
            ApiError: no other candidate can run the request.
        """
        execution, seconds = active.execution, active.first_token_seconds
        if seconds is None:
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

    # Its end.

    async def _close_rejected(self, stages: RequestStages, active: ActiveRequest | None) -> None:
        await stages.close(is_billed=False)
        if active is not None:
            await self._discard_side_executions(active)

    async def _discard_side_executions(self, active: ActiveRequest, code: str = "discarded") -> None:
        """Mark what was computed for a request that is not billed as failed, so that it is not billed either."""
        for execution in active.side_executions:
            if execution.usage is not None:
                await self._ends.end(execution, code)

    async def _close(self, active: ActiveRequest, is_returning: bool) -> None:
        execution = active.execution
        is_served = execution.answer is not None and execution.answer.layer  # no gateway can resume it
        is_awaited = is_returning and not is_served and not execution.is_read and not execution.is_closed
        is_billed = not execution.has_failed
        try:
            await active.stages.close(is_billed=is_billed)
            if not is_billed:
                await self._discard_side_executions(active)
            is_left = is_awaited and not await self._client_return.wait(active)
            await self._ends.end(execution, is_continued=is_left)
        finally:
            self._metrics.count_in_flight(self._dispatcher)
            self._metrics.count_answers(active)
