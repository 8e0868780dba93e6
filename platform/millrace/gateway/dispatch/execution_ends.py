"""The ends of executions.

`end` is the only function that ends an execution, whatever the reason: its last event was read, its client has
disconnected, another execution follows, or it must not be billed. It can be repeated, and may run at any time.
"""

from __future__ import annotations

import asyncio

import redis.asyncio as redis
import structlog

from inference_worker.contract.messages import End, Failed, Tokens
from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission.admission import AdmittedRequest, RateLimitAdmission
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution

log = structlog.get_logger(__name__)

END_SECONDS = 30.0  # how long to wait for the end of a cancelled execution


class ExecutionEnds:
    """Ends the executions of one gateway."""

    def __init__(self, admission: RateLimitAdmission, dispatcher: Dispatcher) -> None:
        self._admission = admission
        self._dispatcher = dispatcher

    async def end(
        self, execution: Execution, failure: str = "", *, is_continued: bool = False, needs_usage: bool = True
    ) -> None:
        """End an execution, and release what it holds.

        If its last event was not read, it is cancelled, and its usage is waited for.

        Args:
            failure: a code. The execution is marked as failed, even if it has ended, so that it is not billed.
            is_continued: it runs on for clients that resume it. Only its rate limits stay taken, until they expire.
            needs_usage: the usage of a cancelled execution is waited for.
        """
        if failure:
            await self._mark_failed(execution, failure)
        if execution.is_closed:
            return
        try:
            if not (is_continued or execution.is_read):
                await self._cancel(execution, failure, needs_usage=needs_usage)
        finally:
            self._dispatcher.release(execution)
            try:
                if execution.answer is not None:
                    await execution.answer.cache.end_flight(execution)
            finally:
                if not is_continued:
                    await self._admission.close(execution.admitted, execution.usage)

    async def drop(self, admitted: AdmittedRequest, execution: Execution | None = None) -> None:
        """Release what was admitted for an execution that does not start. It may have been built already."""
        if execution is not None and execution.answer is not None:
            await execution.answer.cache.end_flight(execution)
        await self._dispatcher.record_not_started(admitted.billing_context)
        await self._admission.close(admitted, None)

    async def record_usage(self, execution: Execution, usage: TokenCounts) -> None:
        """Record what the execution used, and release the rest of its reservation early."""
        execution.usage = usage
        await self._admission.end(execution.admitted, usage)

    async def _mark_failed(self, execution: Execution, code: str) -> None:
        try:
            # First, since a replica that stops earlier settles the tokens that it has computed.
            await self._dispatcher.force_fail(execution.job, execution.attempt, code)
            await self._dispatcher.send_stop(execution)
        except (redis.RedisError, OSError) as exc:  # the failure is sent later
            log.warning("cancellation_failed", request_id=execution.request_id, error=str(exc))

    async def _cancel(self, execution: Execution, failure: str, *, needs_usage: bool) -> None:
        """Cancel the execution and wait for its usage, which is not refunded. A failed one is not waited for."""
        if execution.answer is not None and await execution.answer.cache.end(execution):
            return
        had_finished = execution.is_finished  # a cancellation in the queue finishes it too, without an event
        try:
            end_expected = not failure and (await self._dispatcher.cancel(execution) or had_finished)
        except (redis.RedisError, OSError) as exc:
            log.warning("cancellation_failed", request_id=execution.request_id, error=str(exc))
            end_expected = True
        if not needs_usage:
            return
        try:
            async with asyncio.timeout(END_SECONDS if end_expected else 0):
                while not isinstance(event := await execution.next_event(), Failed):
                    if isinstance(event, End):
                        await self.record_usage(execution, event.usage)
                        return
                    if isinstance(event, Tokens):
                        execution.output_tokens += len(event.token_ids)
        except TimeoutError:
            if execution.output_tokens:  # no end was received; the observed tokens are the minimum
                prompt_tokens = execution.admitted.demand.prompt_tokens
                execution.usage = TokenCounts(uncached=prompt_tokens, output=execution.output_tokens)
