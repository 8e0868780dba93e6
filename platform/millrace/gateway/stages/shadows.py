"""Shadows: copies of a share of a policy's requests, which another target answers too. The answers are only compared.

A shadow is a side execution with the ID `<request>.s`. It starts after the request was dispatched, and the request
never waits for it. Its maximum cost is reserved beside that of the request before it starts. If the sum does not fit a
budget, or no replica has a free slot, there is no shadow. The setting MILLRACE_SHADOWS_PAID_BY decides who pays. Costs
of the operator are booked and are on no invoice. If a gateway stops or fails, its comparisons are lost.

If the request is not billed, because it fails, neither is the tenant's shadow, even if it has answered.

The stage fails open: after an internal error the request has no shadow.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import redis.asyncio as redis
import structlog

from billing.rates.pricing import PriceIndex, UnknownPriceError, price
from inference_worker.contract.messages import AnswerEvent, End
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest, RateLimitAdmission
from millrace.gateway.admission.budget_admission import TIERS
from millrace.gateway.answer_cache.side_executions import SideExecutions
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.tenant_slots import has_free_slot
from millrace.gateway.core.types import InferenceRequest, ResponseSpec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.request_log import RequestLogWriter, ShadowRecord
from millrace.gateway.lifecycle.stage import RequestStage, Stage, StageEvent
from millrace.gateway.lifecycle.tokenizer import PromptTokenizer
from millrace.gateway.protocols.tools import call_fields
from millrace.gateway.routing.router import Router
from millrace.gateway.stages.answer_checks import failed_check
from tenants.keys.snapshot import ApiKeySnapshot, LimitSnapshot
from tenants.routing_policies.policy import Escalation

if TYPE_CHECKING:
    from millrace.environment.configuration import Payer

log = structlog.get_logger(__name__)

MAX_SHADOWS = 8  # concurrently, of one gateway; shared by its tenants
SHADOW_SECONDS = 600.0
SHADOW_DIALECT = "shadow"
CHECKS = Escalation(("schema", "tool_arguments", "empty"))
LOWEST_PRIORITY = 2**31 - 1  # among the tenant's requests


class ShadowedAnswer(RequestStage):
    """The answer of a request that is selected for a shadow, as far as it was received."""

    sees_tokens = True

    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows
        self.events: list[AnswerEvent] = []
        self.is_complete = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.execution: Execution | None = None  # execution of the shadow, once it was sent

    async def before_dispatch(self, active: ActiveRequest, execution: Execution) -> bool:
        if not active.executions:
            self._shadows.start(active, execution, self)
        return False

    async def on_event(self, active: ActiveRequest, event: StageEvent) -> Sequence[StageEvent]:
        if self.task is not None and not isinstance(event, ApiError):
            self.events.append(event)
            if isinstance(event, End):
                self.is_complete.set()
        return (event,)

    async def on_close(self, *, is_billed: bool) -> None:
        """Cancel the shadow of a request that ends without a complete answer, or that is not billed."""
        if self.task is None:
            return
        if not is_billed:
            await self._shadows.discard(self.task, self.execution)
        elif not self.is_complete.is_set():
            self.task.cancel()


class Shadows(Stage):
    """The running shadows of one gateway."""

    name = "shadows"
    fails_closed = False

    def __init__(
        self,
        router: Router,
        admission: RateLimitAdmission,
        dispatcher: Dispatcher,
        executions: SideExecutions,
        prices: PriceIndex,
        request_log: RequestLogWriter,
        metrics: GatewayMetrics,
        payer: Payer,
        tokenizer: PromptTokenizer,
    ) -> None:
        self._router = router
        self._admission = admission
        self._dispatcher = dispatcher
        self._executions = executions
        self._prices = prices
        self._request_log = request_log
        self._count = metrics.shadows
        self._is_operator_paid = payer == "operator"
        self._tokenizer = tokenizer
        self._running: dict[asyncio.Task[None], int] = {}  # task -> tenant

    def open(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> ShadowedAnswer | None:
        policy = key.policies.get(request.model)
        if policy is None or policy.shadow is None or not is_selected(request_id, policy.shadow.percent):
            return None
        return None if request.more_prompts or request.analysis.number or request.echo else ShadowedAnswer(self)

    async def stop(self) -> None:
        """Cancel the running shadows."""
        await cancel_and_wait(list(self._running))

    async def discard(self, task: asyncio.Task[None], execution: Execution | None) -> None:
        """Cancel the shadow of a request that is not billed, and do not bill it to the tenant, even if it has answered.

        Args:
            execution: that of the shadow; None if it was not sent.
        """
        await cancel_and_wait([task])
        if execution is not None and not self._is_operator_paid:
            await self._executions.discard(execution)

    def start(self, active: ActiveRequest, primary: Execution, answer: ShadowedAnswer) -> None:
        """Start the shadow of an execution that is dispatched next, unless it cannot run now."""
        policy, tenant_id = active.route.policy, active.key.tenant_id
        if policy is None or policy.shadow is None or not primary.admitted.demand.sequences:
            return
        model = self._router.find_served(policy.shadow.model)
        reason = "model_not_found" if model is None else self._obstacle(model, primary, tenant_id)
        if model is None or reason:
            active.decision_record.not_shadowing = reason
            self._count.labels("" if model is None else model.name, reason).inc()
            return
        active.decision_record.shadow = {"model": model.name}
        answer.task = task = asyncio.create_task(self._run(active, primary, model, answer))
        self._running[task] = tenant_id
        task.add_done_callback(self._running.pop)

    def _obstacle(self, model: ServedModel, primary: Execution, tenant_id: int) -> str:
        """Return why there is no shadow; empty if there is one."""
        if model.task != "generate":
            return "model_not_found"
        if model.name == primary.model:
            return "same_model"
        if not has_free_slot(tenant_id, MAX_SHADOWS, self._running.values()):
            return "too_many_shadows"
        load = self._dispatcher.relative_load(model.key)
        if load is None:
            return "model_loading"  # a shadow loads no model
        return "" if load < 1 else OVERLOADED

    async def _run(self, active: ActiveRequest, primary: Execution, model: ServedModel, answer: ShadowedAnswer) -> None:
        """Run a shadow, and compare it with the answer of its request."""
        if primary not in active.executions:  # it could not be dispatched
            return
        code, execution, events = "", None, list[AnswerEvent]()
        try:
            try:
                async with asyncio.timeout(SHADOW_SECONDS):
                    admitted = await self._admit(active, primary, model)
                    spec = _response_spec(admitted, primary)
                    record = DecisionRecord(shadow_of=active.request_id)
                    execution, events = await self._executions.run_admitted(
                        admitted, spec, record, may_wait=False, on_start=partial(setattr, answer, "execution")
                    )
            except (ApiError, TimeoutError) as exc:
                code = exc.code if isinstance(exc, ApiError) else "timeout"
                active.decision_record.not_shadowing = code
                await self._dispatcher.record_decisions(active.execution)
            self._count.labels(model.name, code).inc()
            await answer.is_complete.wait()
            self._request_log.add_shadow(await self._compare(active, model, answer.events, code, execution, events))
        except (redis.RedisError, OSError) as exc:
            log.warning("shadow_failed", request_id=active.request_id, error=str(exc))
        except Exception:
            log.exception("shadow_failed", request_id=active.request_id)

    async def _admit(self, active: ActiveRequest, primary: Execution, model: ServedModel) -> AdmittedRequest:
        """Reserve the maximum cost of the shadow.

        Raises:
            ApiError: it does not fit a budget, or cannot run at all.
        """
        key = msgspec.structs.replace(active.key, limits=LimitSnapshot())
        if self._is_operator_paid:
            key = msgspec.structs.replace(key, credentials={})
        prompt, running = primary.admitted.demand.prompt, primary.admitted.demand.model
        if model.tokenization != running.tokenization or model.upstream is not None or running.upstream is not None:
            prompt = await self._tokenizer.tokenize(model, active.request)
        request = msgspec.structs.replace(active.request, priority=LOWEST_PRIORITY)
        name = f"{active.request_id}.s"
        demand = AdmissionRequest(name, time.time_ns() // 1000, key, request, prompt, [model])
        return await self._admission.admit_side_execution(
            demand, primary.admitted.max_tokens, is_operator_paid=self._is_operator_paid
        )

    async def _compare(
        self,
        active: ActiveRequest,
        model: ServedModel,
        answer: list[AnswerEvent],
        code: str,
        execution: Execution | None,
        events: list[AnswerEvent],
    ) -> ShadowRecord:
        """Return the comparison of a complete answer with that of the shadow."""
        request, primary = active.request, active.execution
        policy = active.route.policy
        record = ShadowRecord(
            tenant_id=active.key.tenant_id,
            started_at=active.admitted_at,
            request_id=active.request_id,
            requested_model=request.model,
            policy_version=0 if policy is None else policy.version,
            served_model=primary.model,
            shadow_model=model.name,
            is_operator_paid=self._is_operator_paid,
            code=code,
            has_schema=request.structured is not None,
            failure=await failed_check(CHECKS, request, primary.response_spec, answer) or "",
            output_tokens=0 if primary.usage is None else primary.usage.output,
            cost_femto=self._cost(primary),
            ttft_ms=_milliseconds(primary, primary.first_token_at),
            total_ms=_milliseconds(primary, primary.completed_at),
        )
        if execution is None:
            return record
        return msgspec.structs.replace(
            record,
            shadow_failure=await failed_check(CHECKS, request, execution.response_spec, events) or "",
            shadow_output_tokens=0 if execution.usage is None else execution.usage.output,
            shadow_cost_femto=self._cost(execution),
            shadow_ttft_ms=_milliseconds(execution, execution.first_token_at),
            shadow_total_ms=_milliseconds(execution, execution.completed_at),
        )

    def _cost(self, execution: Execution) -> str | None:
        """Return the cost of an execution by the tenant's prices."""
        demand, card = execution.admitted.demand, execution.admitted.rate_card
        if card is None:
            tier = TIERS[demand.request.service_class]
            card = self._prices.find(demand.key.tenant_id, demand.model.name, tier, demand.admitted_at)
        if card is None or execution.usage is None:
            return None
        try:
            return str(price(card, execution.usage, demand.admitted_at).cost_femto)
        except UnknownPriceError:
            return None


def is_selected(request_id: str, percent: int) -> bool:
    """Return whether a request is among this share of the requests. The same ID always gives the same result."""
    digest = hashlib.blake2b(request_id.encode(), key=b"shadow", digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < percent


def _response_spec(admitted: AdmittedRequest, primary: Execution) -> ResponseSpec:
    demand = admitted.demand
    return ResponseSpec(
        SHADOW_DIALECT,
        demand.request_id,
        demand.model.name,
        primary.response_spec.created,
        demand.prompt.expected_tokens,
        n=demand.request.sampling.n,
        **call_fields(demand.request, demand.model),
    )


def _milliseconds(execution: Execution, moment: float | None) -> int | None:
    """Return the time from the dispatch of an execution."""
    return None if moment is None else round((moment - execution.created_at) * 1000)
