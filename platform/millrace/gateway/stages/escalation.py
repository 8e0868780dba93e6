"""Escalation: the next target answers if a complete answer fails a check of the routing policy.

The maximum cost of the first execution and of all possible further ones is reserved before the first starts. If that
does not fit a budget, the request runs without escalation. Each execution that runs is billed once, at its own price.
What was reserved for the others is returned.

The stage fails open: after an internal error the last complete answer is returned, although it may fail a check.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from msgspec import UNSET

from inference_worker.contract.messages import AnswerEvent, End
from inference_worker.contract.request import ServiceClass, TokenCounts
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest, RateLimitAdmission
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.execution_builder import with_prompt
from millrace.gateway.lifecycle.execution_starter import ExecutionStarter, add_spare_tokens
from millrace.gateway.lifecycle.stage import RequestStage, Stage, StageEvent
from millrace.gateway.lifecycle.tokenizer import PromptTokenizer
from millrace.gateway.stages.answer_checks import failed_check
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)


class EscalationReserves:
    """Reserves and returns the maximum costs of executions that may follow another one."""

    def __init__(self, admission: RateLimitAdmission, dispatcher: Dispatcher) -> None:
        self._admission = admission
        self._dispatcher = dispatcher

    async def reserve(self, demand: AdmissionRequest) -> AdmittedRequest:
        """Reserve the maximum cost of an execution that may follow.

        Raises:
            ApiError: it does not fit a budget.
        """
        return await self._admission.reserve_further(demand)

    async def admit(self, reserved: AdmittedRequest) -> AdmittedRequest:
        """Admit an execution whose cost is reserved.

        Raises:
            ApiError: it cannot start now. Its reservation is returned.
        """
        demand = reserved.demand
        batch = demand.request.service_class == ServiceClass.BATCH
        try:
            self._dispatcher.require_capacity(demand.model.key, demand.key.tenant_id, demand.key.weight, batch=batch)
            return await self._admission.admit_reserved(reserved)
        except BaseException:
            await self.give_back(reserved)
            raise

    async def give_back(self, reserved: AdmittedRequest) -> None:
        """Return the reservation of an execution that does not start."""
        if not await self._admission.return_further(reserved):
            await self._admission.end(reserved, TokenCounts())
            await self._dispatcher.record_not_started(reserved.billing_context)


class Escalations(RequestStage):
    """The escalations of one request. Until an answer has passed, its events are held back."""

    sees_tokens = True

    def __init__(self, stage: EscalationStage) -> None:
        self._stage = stage
        self.held: list[AnswerEvent] = []
        self.reserved: list[AdmittedRequest] = []  # in their order
        self._first: Execution | None = None  # the execution before the escalations
        self._reserved_prompt: Prompt | None = None  # its prompt with room for what a stage adds
        self._escalates = False  # complete answers are checked
        self._is_starting = False
        self._count = 0
        self._answered: tuple[ActiveRequest, Execution, list[AnswerEvent]] | None = None

    async def before_admission(self, active: ActiveRequest) -> None:
        await self._give_back()  # what an earlier target has reserved

    async def before_dispatch(self, active: ActiveRequest, execution: Execution) -> bool:
        if not self._is_starting:
            await self._reserve(active, execution)
        return False

    async def on_event(self, active: ActiveRequest, event: StageEvent) -> Sequence[StageEvent]:
        if not self._escalates and self._answered is None:
            return (event,)
        if isinstance(event, ApiError):
            if self._answered is None:
                return (event,)
            active.skip(event)
            return await self._finish(active)
        if self._answered is not None and self.held is self._answered[2]:
            self.held = []  # the answer of another execution begins
        self.held.append(event)
        if not isinstance(event, End):
            return ()
        self._answered = active, active.execution, self.held
        escalation = active.route.escalation if self._escalates else None
        spec = active.execution.response_spec
        check = None if escalation is None else await failed_check(escalation, active.request, spec, self.held)
        active.keeps_answer = check is None
        if check is not None and await self._escalate(active, check):
            return ()
        return await self._finish(active)

    async def on_close(self, *, is_billed: bool) -> None:
        await self._give_back()
        if not is_billed and self._answered is not None:
            await self._return_to_answer("internal_error")

    async def _reserve(self, active: ActiveRequest, execution: Execution) -> None:
        """Reserve the maximum cost of all possible escalations of a request, after its first execution, or of none."""
        escalation, request, demand = active.route.escalation, active.request, execution.admitted.demand
        self._escalates = False
        if escalation is None or request.stream or request.echo or not demand.sequences:
            return
        self._first = execution
        self._reserved_prompt = prompt = add_spare_tokens(demand.prompt, active.spare_tokens)
        models = active.remaining_candidates[: escalation.max - self._count]
        try:
            for number, model in enumerate(models, len(active.executions) + 1):
                if model.tokenization == active.tokenization:
                    each = prompt
                else:
                    each = await self._stage.tokenizer.tokenize(model, request)
                self.reserved.append(
                    await self._stage.reserves.reserve(
                        AdmissionRequest(
                            active.request_id, active.admitted_at, active.key, request, each, [model], number
                        )
                    )
                )
        except ApiError as exc:
            active.decision_record.not_escalating = exc.code
            await self._give_back()
        self._escalates = bool(self.reserved)

    async def _escalate(self, active: ActiveRequest, check: str) -> bool:
        """Start the execution that is reserved next. Return False if there is none, or it cannot start."""
        entry = {"model": active.model, "check": check}
        active.decision_record.escalate(entry)
        if not self.reserved:
            entry["reason"] = "no target left"
            return False
        execution, reserved = active.execution, self.reserved.pop(0)
        self._count += 1
        await self._stage.starter.ends.end(execution)
        log.info("escalation_started", request_id=active.request_id, model=active.model, check=check)
        if reserved.demand.prompt is self._reserved_prompt and self._first is not None:
            reserved = with_prompt(reserved, self._first.admitted.demand.prompt)
        self._is_starting = True
        try:
            await self._begin_reserved(active, reserved)
        except ApiError as exc:
            active.skip(exc)
            active.make_current(execution)
            return False
        finally:
            self._is_starting = False
        return True

    async def _begin_reserved(self, active: ActiveRequest, reserved: AdmittedRequest) -> None:
        """Start an execution whose cost is reserved.

        Raises:
            ApiError: it cannot start. Its reservation is returned.
        """
        model = reserved.demand.model
        admitted = await self._stage.reserves.admit(reserved)
        active.remaining_candidates = [each for each in active.remaining_candidates if each.name != model.name]
        active.target, active.prompt, active.tokenization = model, reserved.demand.prompt, model.tokenization
        await self._stage.starter.start(active, admitted)

    async def _finish(self, active: ActiveRequest) -> Sequence[AnswerEvent]:
        """Return the events of the last complete answer, and what is still reserved."""
        await self._give_back()
        if active.decision_record.escalations is not UNSET:
            await self._stage.dispatcher.record_decisions(active.execution)
        return await self._return_to_answer()

    async def _return_to_answer(self, failure: str = "") -> Sequence[AnswerEvent]:
        """Make the last complete answer the request's. Return its events.

        Args:
            failure: code of the failure for which an execution that follows the answer is not billed.
        """
        if self._answered is None:
            raise AssertionError("no answer was complete")
        active, execution, self.held = self._answered
        if execution is not active.execution:
            await self._stage.starter.ends.end(active.execution, failure)
            active.make_current(execution)
        return self.held

    async def _give_back(self) -> None:
        """Return the reservations of executions that do not start."""
        while self.reserved:
            await self._stage.reserves.give_back(self.reserved.pop())


class EscalationStage(Stage):
    """The escalations of one gateway."""

    name = "escalation"
    fails_closed = False

    def __init__(
        self,
        reserves: EscalationReserves,
        dispatcher: Dispatcher,
        starter: ExecutionStarter,
        tokenizer: PromptTokenizer,
    ) -> None:
        self.reserves = reserves
        self.dispatcher = dispatcher
        self.starter = starter
        self.tokenizer = tokenizer

    def open(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> Escalations | None:
        policy = key.policies.get(request.model)
        if policy is None or request.stream or not any(rule.escalate for rule in policy.rules):
            return None
        return Escalations(self)
