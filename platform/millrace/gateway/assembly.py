"""The assembly of the inference service: the spine of its requests, and all stages in their order.

A stage receives the events of a request after those above it in `_make_stages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from billing.rates.pricing import PriceIndex
from millrace.gateway.admission.admission import RateLimitAdmission
from millrace.gateway.admission.budget_shares import BudgetShares
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.answer_cache.answer_cache import AnswerCache
from millrace.gateway.answer_cache.side_executions import SideExecutions
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core.asyncio_utils import BackgroundTasks
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution_ends import ExecutionEnds
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.lifecycle.answer_metrics import AnswerMetrics
from millrace.gateway.lifecycle.client_return import ClientReturn
from millrace.gateway.lifecycle.execution_builder import ExecutionBuilder
from millrace.gateway.lifecycle.execution_starter import ExecutionStarter
from millrace.gateway.lifecycle.request_log import RequestLogWriter
from millrace.gateway.lifecycle.request_routing import RequestRouting
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.lifecycle.stage import Stage, Stages
from millrace.gateway.lifecycle.tokenizer import PromptTokenizer
from millrace.gateway.routing.router import Router
from millrace.gateway.routing.signals import LatencyTracker
from millrace.gateway.stages.answer_cache import AnswerCacheStage
from millrace.gateway.stages.escalation import EscalationReserves, EscalationStage
from millrace.gateway.stages.experiments import ExperimentStage
from millrace.gateway.stages.semantic_checks import SemanticChecks
from millrace.gateway.stages.shadows import Shadows
from millrace.gateway.stages.summaries import Summaries

if TYPE_CHECKING:
    from millrace.environment.configuration import Payer


@dataclass(kw_only=True)
class ServiceParts:
    """What the inference service is made of."""

    router: Router
    admission: RateLimitAdmission
    dispatcher: Dispatcher
    metrics: GatewayMetrics
    jobs: InferenceJobBuilder
    answers: AnswerCache
    side_executions: SideExecutions
    disk: DiskWatch
    request_log: RequestLogWriter
    active_requests: ActiveRequests
    subscribers: StreamSubscribers
    prices: PriceIndex = field(default_factory=PriceIndex)
    latencies: LatencyTracker = field(default_factory=LatencyTracker)
    budget_shares: BudgetShares | None = None
    checks_paid_by: Payer = "tenant"
    shadows_paid_by: Payer = "tenant"
    tokenizer: PromptTokenizer = field(default_factory=PromptTokenizer)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)


def make_service(parts: ServiceParts) -> InferenceService:
    """Return a service with all stages."""
    ends = ExecutionEnds(parts.admission, parts.dispatcher)
    builder = ExecutionBuilder(parts.dispatcher.broker, parts.jobs)
    starter = ExecutionStarter(parts.admission, parts.dispatcher, builder, parts.tokenizer, ends)
    return InferenceService(
        RequestRouting(parts.router, parts.tokenizer, parts.budget_shares),
        parts.dispatcher,
        starter,
        Stages(_make_stages(parts, starter, builder), parts.metrics),
        ClientReturn(parts.active_requests, parts.subscribers),
        AnswerMetrics(parts.metrics, parts.latencies),
        parts.disk,
        parts.background,
    )


def _make_stages(parts: ServiceParts, starter: ExecutionStarter, builder: ExecutionBuilder) -> list[Stage]:
    """Return all stages in the order in which a request passes through them."""
    reserves = EscalationReserves(parts.admission, parts.dispatcher)
    return [
        ExperimentStage(parts.router),
        EscalationStage(reserves, parts.dispatcher, starter, parts.tokenizer),
        AnswerCacheStage(parts.answers, starter.ends, parts.background),
        SemanticChecks(parts.side_executions, parts.answers, parts.checks_paid_by),
        Summaries(parts.router, parts.dispatcher, parts.jobs, reserves, starter.ends, builder, parts.tokenizer),
        Shadows(
            parts.router,
            parts.admission,
            parts.dispatcher,
            parts.side_executions,
            parts.prices,
            parts.request_log,
            parts.metrics,
            parts.shadows_paid_by,
            parts.tokenizer,
        ),
    ]
