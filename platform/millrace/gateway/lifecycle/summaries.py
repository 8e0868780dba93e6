"""Summaries of the messages that a conversation drops because it has outgrown its context.

A summary is an execution of its own, with the request ID `<request>.0`, by the model that the routing policy names. It
is billed once, at its own price. Its maximum cost is reserved together with that of the answer, before it starts. If
the sum does not fit a budget, or if the summary fails, the messages are dropped without one. The answer cache is read
before it starts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from inference_worker.contract.messages import End, Failed, Tokens
from inference_worker.contract.request import ServiceClass
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest, RateLimitAdmission
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import Prompt, ResponseSpec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_ends import ExecutionEnds
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.streams import LOCAL_FAILURES
from millrace.gateway.lifecycle.escalation import EscalationReserves
from millrace.gateway.protocols import context_overflow
from millrace.gateway.protocols.prompts import make_prompt
from millrace.gateway.routing.router import Router

if TYPE_CHECKING:
    from millrace.gateway.lifecycle.active_request import ActiveRequest

SUMMARY_SECONDS = 60.0
SUMMARY_DIALECT = "summary"


class SummaryError(Exception):
    """The reason why there is no summary, for the decision record."""


class Summaries:
    """Runs the executions of summaries."""

    def __init__(
        self,
        router: Router,
        admission: RateLimitAdmission,
        dispatcher: Dispatcher,
        jobs: InferenceJobBuilder,
        reserves: EscalationReserves,
        ends: ExecutionEnds,
    ) -> None:
        self._router = router
        self._admission = admission
        self._dispatcher = dispatcher
        self._jobs = jobs
        self._reserves = reserves
        self._ends = ends

    def model_of(self, active: ActiveRequest) -> ServedModel | None:
        """Return the model that summarizes for a request; None if its messages are dropped without a summary."""
        policy = active.route.policy
        if policy is None or policy.context_overflow != "summarize" or "not_summarizing" in active.decision_record:
            return None
        model = self._router.find_served(policy.summarizer)
        if model is None or model.upstream is not None or model.task != "generate":
            active.decision_record["not_summarizing"] = "model_not_found"
            return None
        return model

    async def summarize(self, active: ActiveRequest, model: ServedModel, dropped: int) -> str:
        """Return the summary of the dropped messages; empty if there is none. The answer's cost is reserved already."""
        try:
            return await self._run(active, await self._reserve(active, model, dropped), dropped)
        except (ApiError, SummaryError, TimeoutError) as exc:
            reason = exc.code if isinstance(exc, ApiError) else str(exc) or "timeout"
            active.decision_record["not_summarizing"] = reason
            return ""

    async def _reserve(self, active: ActiveRequest, model: ServedModel, dropped: int) -> AdmittedRequest:
        """Reserve the maximum cost of the summary, and check its rate limits."""
        key, batch = active.key, active.request.service_class == ServiceClass.BATCH
        self._dispatcher.require_capacity(model.key, key.tenant_id, key.weight, batch=batch)
        prompt = await self._prompt(active, model, dropped)
        demand = AdmissionRequest(
            f"{active.request_id}.0",
            active.admitted_at,
            key,
            context_overflow.summary_request(active.request),
            prompt,
            [model],
        )
        reserved = await self._admission.reserve_further(demand)
        try:
            return await self._admission.admit_reserved(reserved)
        except BaseException:
            await self._reserves.return_one(reserved)
            raise

    async def _prompt(self, active: ActiveRequest, model: ServedModel, dropped: int) -> Prompt:
        request = active.request
        return await make_prompt(
            model,
            request,
            lambda: context_overflow.summary_prompt(model, request, dropped),
            lambda prompts: prompts.summary_prompt(model, request.number, dropped),
        )

    async def _run(self, active: ActiveRequest, admitted: AdmittedRequest, dropped: int) -> str:
        """Run the execution and return its text."""
        demand = admitted.demand
        try:
            spec = ResponseSpec(
                SUMMARY_DIALECT,
                demand.request_id,
                demand.model.name,
                active.admitted_at // 1_000_000,
                demand.prompt_tokens,
            )
            record: dict[str, Any] = {"tenant": active.key.tenant_id, "project": active.key.project_id}
            record["requested_model"] = demand.request.model
            execution = Execution(self._dispatcher.broker, admitted, self._jobs.make(admitted), spec, record)
            self._dispatcher.submit(execution)
        except BaseException:
            await self._ends.drop(admitted)
            raise
        active.summaries.append(execution)
        try:
            async with asyncio.timeout(SUMMARY_SECONDS):
                text = await self._text(execution)
        finally:
            await asyncio.shield(self._ends.end(execution))
        if not text:
            raise SummaryError("empty")
        placed = execution.decision_record.get("executions") or [{}]
        summary = {"model": execution.model, "messages": dropped, "replica": placed[-1].get("replica", "")}
        active.decision_record["summary"] = summary
        return text

    async def _text(self, execution: Execution) -> str:
        parts: list[str] = []
        while True:
            event = await execution.next_event()
            if isinstance(event, Tokens):
                execution.output_tokens += len(event.token_ids)
                parts.append(event.text)
            elif isinstance(event, Failed):
                if event.code in LOCAL_FAILURES:
                    await self._ends.end(execution, event.code)
                raise SummaryError(event.code)
            elif isinstance(event, End):
                await self._ends.record_usage(execution, event.usage)
                if event.finish_reason == "cancelled":
                    raise SummaryError("cancelled")
                return "".join(parts).strip()


def with_prompt(admitted: AdmittedRequest, prompt: Prompt) -> AdmittedRequest:
    """Return the admission of a shorter prompt. What is reserved for the longer one does not change."""
    changed = msgspec.structs.replace(admitted, demand=msgspec.structs.replace(admitted.demand, prompt=prompt))
    vars(changed).clear()  # `replace` copies cached properties
    return changed
