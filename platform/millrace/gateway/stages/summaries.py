"""Summaries of the messages that a conversation drops because it has outgrown its context.

A summary is an execution of its own, with the request ID `<request>.0`, by the model that the routing policy names. It
is billed once, at its own price. Its maximum cost is reserved together with that of the answer, before it starts. If
the sum does not fit a budget, or if the summary fails, the messages are dropped without one. The answer cache is read
before it starts.

The stage fails open: after an internal error the messages are dropped without a summary, or the request is refused as
too long.
"""

from __future__ import annotations

import asyncio
import contextlib

from msgspec import UNSET

from inference_worker.contract.messages import End, Failed, Tokens
from inference_worker.contract.request import ServiceClass
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_ends import ExecutionEnds
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.streams import LOCAL_FAILURES
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.execution_builder import ExecutionBuilder
from millrace.gateway.lifecycle.stage import RequestStage, Stage
from millrace.gateway.lifecycle.tokenizer import PromptTokenizer
from millrace.gateway.protocols import context_overflow
from millrace.gateway.protocols.prompts import make_prompt
from millrace.gateway.routing.router import Router
from millrace.gateway.stages.escalation import EscalationReserves
from tenants.keys.snapshot import ApiKeySnapshot

SUMMARY_SECONDS = 60.0
SUMMARY_DIALECT = "summary"


class SummaryError(Exception):
    """The reason why there is no summary, for the decision record."""


class ShortenedConversation(RequestStage):
    """A conversation that is shortened if it has outgrown its context, and its summary."""

    def __init__(self, summaries: Summaries) -> None:
        self._summaries = summaries
        self.summary = ""  # summary of the messages that were dropped
        self._is_needed = False  # the next execution needs a summary

    async def before_admission(self, active: ActiveRequest) -> None:
        """Drop messages of a conversation that outgrows the context of the last candidate.

        Raises:
            ApiError: 400, it cannot be shortened enough.
        """
        self._is_needed = False
        await self._summaries.tokenizer.fit(active)
        policy, request, model = active.route.policy, active.request, active.served_target
        if policy is None or policy.context_overflow == "refuse" or active.falls_back("context"):
            return
        room = model.context_length - context_overflow.output_room(model, request)
        if active.prompt.num_tokens <= room or room < 1 or not context_overflow.can_shorten(model, request):
            return
        whole_prompt = active.prompt.ids
        if self.summary or self._summaries.model_of(active) is None:
            active.prompt = await self._shorten(active, room)
            return
        try:
            active.prompt = await self._shorten(active, room - context_overflow.SUMMARY_ROOM)
        except ApiError as exc:  # the last message leaves no room for a summary
            active.decision_record.not_summarizing = exc.code
            active.prompt = await self._shorten(active, room)
            return
        self._is_needed, active.whole_prompt, active.spare_tokens = True, whole_prompt, context_overflow.SUMMARY_ROOM

    async def before_dispatch(self, active: ActiveRequest, execution: Execution) -> bool:
        """Add a summary of the dropped messages to the prompt, or dispatch it without one if that fails."""
        if active.spare_refusal:
            active.decision_record.not_summarizing = active.spare_refusal
        if not self._is_needed or active.spare_refusal or active.rejection is not None:
            return False
        self._is_needed = False
        summarizer, dropped = self._summaries.model_of(active), active.prompt.dropped_messages
        if summarizer is not None:
            self.summary = await self._summaries.summarize(active, summarizer, dropped)
        if self.summary:
            room = active.prompt.num_tokens + context_overflow.SUMMARY_ROOM
            with contextlib.suppress(ApiError):  # the summary is longer than its room
                active.prompt = await self._shorten(active, room)
                self._summaries.builder.set_prompt(active, execution)
                execution.has_summary = True
        return False

    async def _shorten(self, active: ActiveRequest, room: int) -> Prompt:
        request, model, summary = active.request, active.served_target, self.summary
        prompt = await make_prompt(
            model,
            request,
            lambda: context_overflow.shorten_prompt(model, request, room, summary),
            lambda prompts: prompts.shorten(model, request.analysis.number, room, summary),
        )
        active.decision_record.dropped_messages = prompt.dropped_messages
        return prompt


class Summaries(Stage):
    """Runs the executions of summaries."""

    name = "summaries"
    fails_closed = False

    def __init__(
        self,
        router: Router,
        dispatcher: Dispatcher,
        jobs: InferenceJobBuilder,
        reserves: EscalationReserves,
        ends: ExecutionEnds,
        builder: ExecutionBuilder,
        tokenizer: PromptTokenizer,
    ) -> None:
        self.builder = builder
        self.tokenizer = tokenizer
        self._router = router
        self._dispatcher = dispatcher
        self._jobs = jobs
        self._reserves = reserves
        self._ends = ends

    def open(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> ShortenedConversation | None:
        policy = key.policies.get(request.model)
        return None if policy is None or policy.context_overflow == "refuse" else ShortenedConversation(self)

    def model_of(self, active: ActiveRequest) -> ServedModel | None:
        """Return the model that summarizes for a request; None if its messages are dropped without a summary."""
        policy, has_failed = active.route.policy, active.decision_record.not_summarizing is not UNSET
        if policy is None or policy.context_overflow != "summarize" or has_failed:
            return None
        model = self._router.find_served(policy.summarizer)
        if model is None or model.upstream is not None or model.task != "generate":
            active.decision_record.not_summarizing = "model_not_found"
            return None
        return model

    async def summarize(self, active: ActiveRequest, model: ServedModel, dropped: int) -> str:
        """Return the summary of the dropped messages; empty if there is none. The answer's cost is reserved already."""
        try:
            return await self._run(active, await self._reserve(active, model, dropped), dropped)
        except (ApiError, SummaryError, TimeoutError) as exc:
            reason = exc.code if isinstance(exc, ApiError) else str(exc) or "timeout"
            active.decision_record.not_summarizing = reason
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
        return await self._reserves.admit(await self._reserves.reserve(demand))

    async def _prompt(self, active: ActiveRequest, model: ServedModel, dropped: int) -> Prompt:
        request = active.request
        return await make_prompt(
            model,
            request,
            lambda: context_overflow.summary_prompt(model, request, dropped),
            lambda prompts: prompts.summary_prompt(model, request.analysis.number, dropped),
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
            record = DecisionRecord(
                tenant=active.key.tenant_id, project=active.key.project_id, requested_model=demand.request.model
            )
            execution = Execution(self._dispatcher.broker, admitted, self._jobs.make(admitted), spec, record)
            self._dispatcher.submit(execution)
        except BaseException:
            await self._ends.drop(admitted)
            raise
        active.side_executions.append(execution)
        try:
            async with asyncio.timeout(SUMMARY_SECONDS):
                text = await self._text(execution)
        finally:
            await asyncio.shield(self._ends.end(execution))
        if not text:
            raise SummaryError("empty")
        placed = execution.decision_record.placements or [{}]
        summary = {"model": execution.model, "messages": dropped, "replica": placed[-1].get("replica", "")}
        active.decision_record.summary = summary
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
