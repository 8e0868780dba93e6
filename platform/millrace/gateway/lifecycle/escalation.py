"""Reservations for the escalations of a request: the executions that follow if an answer fails a check.

The maximum cost of the first execution and of all possible further ones is reserved before the first starts. If that
does not fit a budget, the request runs without escalation. Each execution that runs is billed once, at its own price.
What was reserved for the others is returned.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest, RateLimitAdmission
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.dispatch.dispatcher import Dispatcher

if TYPE_CHECKING:
    from millrace.gateway.lifecycle.active_request import ActiveRequest

Tokenize = Callable[[ServedModel, InferenceRequest], Awaitable[Prompt]]


class EscalationReserves:
    """Reserves and returns the maximum costs of further executions."""

    def __init__(self, admission: RateLimitAdmission, dispatcher: Dispatcher, tokenize: Tokenize) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._tokenize = tokenize

    async def reserve(self, active: ActiveRequest, admitted: AdmittedRequest) -> None:
        """Reserve the maximum cost of all possible escalations of a request, after its first execution, or of none."""
        escalation, request = active.route.escalation, active.request
        active.escalates = False
        if escalation is None or request.stream or request.echo or not admitted.demand.sequences:
            return
        reserved: list[AdmittedRequest] = []
        try:
            models = active.remaining_candidates[: escalation.max - active.escalations]
            for number, model in enumerate(models, len(active.executions) + 1):
                prompt = admitted.demand.prompt
                if model.tokenization != active.tokenization:
                    prompt = await self._tokenize(model, request)
                demand = AdmissionRequest(
                    active.request_id, active.admitted_at, active.key, request, prompt, [model], number
                )
                reserved.append(await self._admission.reserve_further(demand))
        except ApiError as exc:
            active.decision_record["not_escalating"] = exc.code
            await self._return(reserved)
            return
        except BaseException:
            await self._return(reserved)
            raise
        active.reserved, active.escalates = reserved, bool(reserved)

    async def release(self, active: ActiveRequest) -> None:
        """Return the reservations of executions that do not start."""
        reserved, active.reserved = active.reserved, []
        await self._return(reserved)

    async def _return(self, reserved: list[AdmittedRequest]) -> None:
        for each in reserved:
            await self.return_one(each)

    async def return_one(self, reserved: AdmittedRequest) -> None:
        """Return the reservation of an execution that does not start."""
        if not await self._admission.return_further(reserved):
            await self._admission.end(reserved, TokenCounts())
            await self._dispatcher.record_not_started(reserved.billing_context)
