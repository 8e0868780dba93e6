"""Side executions: executions beside that of the request, such as the vector of a question, or a shadow.

Each has its own ID and is admitted and billed like a request of the key, but does not count toward its rate limits. The
operator may pay for it. Then it uses no budget of the tenant and none of its upstream credentials.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from inference_worker.contract.messages import AnswerEvent, End, Failed
from inference_worker.contract.request import ServiceClass
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest, RateLimitAdmission
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_ends import ExecutionEnds
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from tenants.keys.snapshot import ApiKeySnapshot, LimitSnapshot


class SideExecutions:
    """Runs side executions of one gateway."""

    def __init__(self, admission: RateLimitAdmission, dispatcher: Dispatcher, jobs: InferenceJobBuilder) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._jobs = jobs
        self._ends = ExecutionEnds(admission, dispatcher)

    async def run(
        self,
        name: str,
        key: ApiKeySnapshot,
        request: InferenceRequest,
        prompt: Prompt,
        model: ServedModel,
        spec: ResponseSpec,
        decision_record: DecisionRecord,
        *,
        is_operator_paid: bool = False,
        on_start: Callable[[Execution], None] | None = None,
    ) -> tuple[Execution, list[AnswerEvent]]:
        """Run an execution with this ID. Return it with its events, the last of which is the end.

        Args:
            is_operator_paid: the tenant does not pay for it.
            on_start: receives the execution when it has been sent.

        Raises:
            ApiError: it is rejected, or it failed.
        """
        batch = request.service_class == ServiceClass.BATCH
        self._dispatcher.require_capacity(model.key, key.tenant_id, key.weight, batch=batch)
        key = msgspec.structs.replace(key, limits=LimitSnapshot())
        if is_operator_paid:
            key = msgspec.structs.replace(key, credentials={})
        demand = AdmissionRequest(name, time.time_ns() // 1000, key, request, prompt, [model])
        if is_operator_paid:
            admitted = await self._admission.admit_side_execution(demand, is_operator_paid=True)
        else:
            admitted = await self._admission.admit(demand)
        return await self.run_admitted(admitted, spec, decision_record, on_start=on_start)

    async def run_admitted(
        self,
        admitted: AdmittedRequest,
        spec: ResponseSpec,
        decision_record: DecisionRecord,
        *,
        may_wait: bool = True,
        on_start: Callable[[Execution], None] | None = None,
    ) -> tuple[Execution, list[AnswerEvent]]:
        """Run an admitted execution. Its reservation is released in any case.

        Args:
            may_wait: whether it may wait for a replica with capacity.
            on_start: receives the execution when it has been sent.

        Raises:
            ApiError: it cannot start, or it failed.
        """
        execution: Execution | None = None
        try:
            made = Execution(self._dispatcher.broker, admitted, self._jobs.make(admitted), spec, decision_record)
            self._dispatcher.submit(made)
            execution = made
            if on_start is not None:
                on_start(made)
            if made.is_queued and not may_wait:
                raise self._dispatcher.build_overload_error(made.deployment_key, None)
            return made, await _events(made)
        finally:
            await asyncio.shield(self._end(admitted, execution))

    async def discard(self, execution: Execution) -> None:
        """Mark an execution as failed, even if it has ended, so that it is not billed."""
        await self._ends.end(execution, "discarded", needs_usage=False)

    async def _end(self, admitted: AdmittedRequest, execution: Execution | None) -> None:
        if execution is None:
            await self._ends.drop(admitted)
            return
        try:
            if execution.usage is not None:
                await self._admission.end(admitted, execution.usage)
        finally:
            await self._ends.end(execution, needs_usage=False)


async def _events(execution: Execution) -> list[AnswerEvent]:
    """Return the events of an execution.

    Raises:
        ApiError: the execution failed.
    """
    events: list[AnswerEvent] = []
    while not isinstance(event := await execution.next_event(), End):
        if isinstance(event, Failed):
            raise ApiError(event.code, event.message)
        if execution.first_token_at is None:
            execution.first_token_at = time.monotonic()
        events.append(event)
    execution.usage, execution.completed_at = event.usage, time.monotonic()
    return [*events, event]
