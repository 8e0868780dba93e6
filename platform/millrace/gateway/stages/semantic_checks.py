"""Checks of semantic hits: a share of the hits is computed again, in the batch class.

A check is a side execution. The setting MILLRACE_SEMANTIC_CACHE_CHECKS_PAID_BY decides who pays for it. If a gateway
stops or fails, its unfinished checks are lost, whatever their result would have been.

The stage fails open: after an internal error the hit is not checked, so it does not count in the evidence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract.messages import End
from inference_worker.contract.request import ServiceClass
from millrace.gateway.answer_cache.answer_cache import AnswerCache
from millrace.gateway.answer_cache.semantic_cache import Question
from millrace.gateway.answer_cache.side_executions import SideExecutions
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.tenant_slots import has_free_slot
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.stage import RequestStage, Stage, StageEvent
from tenants.keys.snapshot import ApiKeySnapshot

if TYPE_CHECKING:
    from millrace.environment.configuration import Payer

log = structlog.get_logger(__name__)

MAX_CHECKS = 8  # concurrently, of one gateway; shared by its tenants; further hits are not checked
CHECK_SECONDS = 600.0


class CheckedHit(RequestStage):
    """A request whose semantic hit may be checked."""

    def __init__(self, checks: SemanticChecks) -> None:
        self._checks = checks

    async def on_event(self, active: ActiveRequest, event: StageEvent) -> Sequence[StageEvent]:
        question = active.question
        if isinstance(event, End) and active.keeps_answer and question is not None and question.is_verified:
            self._checks.start(active.execution, question)
        return (event,)


class SemanticChecks(Stage):
    """The running checks of one gateway."""

    name = "semantic_checks"
    fails_closed = False

    def __init__(self, executions: SideExecutions, answers: AnswerCache, payer: Payer) -> None:
        self._executions = executions
        self._answers = answers
        self._payer = payer
        self._running: dict[asyncio.Task[None], int] = {}  # task -> tenant

    def open(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> CheckedHit | None:
        return CheckedHit(self) if key.serves_similar(request.model) else None

    def start(self, hit: Execution, question: Question) -> None:
        """Start the check of a hit, unless too many run, of all tenants or of this one."""
        if not has_free_slot(hit.tenant, MAX_CHECKS, self._running.values()):
            return
        task = asyncio.create_task(self._run(hit, question))
        self._running[task] = hit.tenant
        task.add_done_callback(self._running.pop)

    async def stop(self) -> None:
        """Cancel the running checks."""
        await cancel_and_wait(list(self._running))

    async def _run(self, hit: Execution, question: Question) -> None:
        demand = hit.admitted.demand
        request = msgspec.structs.replace(demand.request, service_class=ServiceClass.BATCH)
        name, record = f"{hit.request_id}.v", DecisionRecord(checks=hit.request_id)
        is_operator_paid = self._payer == "operator"
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                _, events = await self._executions.run(
                    name,
                    question.key,
                    request,
                    demand.prompt,
                    demand.model,
                    hit.response_spec,
                    record,
                    is_operator_paid=is_operator_paid,
                )
            await self._answers.record_check(hit, question, events, is_operator_paid=is_operator_paid)
        except (ApiError, redis.RedisError, OSError, TimeoutError) as exc:
            log.info("semantic_check_failed", request_id=hit.request_id, error=str(exc))
        except Exception:
            log.exception("semantic_check_failed", request_id=hit.request_id)
