"""Escalation under a hard budget: the sum of all executions is reserved first, and each is billed at its own price."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async

from inference_worker.contract.messages import USAGE_STREAM, End, ExecutionUsage, Tokens, decode_usage
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.conf.environment import platform_settings
from millrace.gateway.admission.budget_admission import RequestAdmission
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.answer_cache.answer_cache import AnswerCache
from millrace.gateway.answer_cache.answer_store import AnswerStore
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.protocols.openai import completions
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.policy import parse
from tests.support.billing.books import rate_card
from tests.support.gateway.budgets import budget_period, check_invariants, settle_events

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
MODELS = {name: ServedModel(name, None, 10_000, 1000, 0) for name in ("small", "large")}  # type: ignore[arg-type]
PROMPT, OUTPUT = 1000, 500
SMALL, LARGE = 2_000_000, 20_000_000  # nano-USD of a request: 1 and 10 USD per million input tokens, 2 and 20 output
POLICY = {
    "rules": [
        {
            "targets": [{"model": "small"}, {"model": "large"}],
            "strategy": "ordered",
            "escalate": {"on": ["pattern"], "pattern": "good"},
        }
    ]
}


class Workers(Dispatcher):
    """A dispatcher whose executions answer immediately: the small model badly, the large one well."""

    def __init__(self, broker: redis.Redis) -> None:
        super().__init__(broker, broker, "gw-a", queue_seconds=5, retention_seconds=60)
        self.usage: list[ExecutionUsage] = []

    def require_capacity(self, key: str, tenant: int, weight: float = 1.0, *, batch: bool = False) -> None:
        return

    def submit(self, execution: Execution) -> None:
        context, attempt = execution.job.billing_context, execution.attempt
        counts = TokenCounts(PROMPT, output=execution.job.params.max_tokens)
        self.usage.append(ExecutionUsage(context, attempt, "completed", "stop", counts, "r", 0))
        text = "bad" if context.model == "small" else "good"
        execution.is_finished = True
        execution.buffer.put(Tokens(context.request_id, attempt, 0, [1], text))
        execution.buffer.put(End(context.request_id, attempt, 1, "stop", None, counts))


def make_service(broker: redis.Redis, workers: Workers, gateway: Any) -> InferenceService:
    settings = platform_settings()
    return InferenceService(
        Router(MODELS),
        RequestAdmission(broker, gateway.budget_admission),
        workers,
        GatewayMetrics(workers.replicas),
        ActiveRequests(),
        StreamSubscribers(broker),
        InferenceJobBuilder("gw-a", "secret", 60),
        AnswerCache(AnswerStore(broker, "secret", 60), workers),
        DiskWatch(settings.data_dir, settings.min_free_disk),
    )


async def run(service: InferenceService, key: ApiKeySnapshot, number: int) -> ActiveRequest | str:
    """Run a request to its end. Return it, or the code of its rejection."""
    request = InferenceRequest("mine", [1] * PROMPT, SamplingParams(), OUTPUT)
    try:
        active = await service.begin(key, request, completions.DIALECT, f"req_{number}")
    except ApiError as exc:
        return exc.code
    events = [event async for event in service.events(active)]
    service.release(active)
    assert isinstance(events[-1], End)
    return active


async def not_started(broker: redis.Redis) -> list[ExecutionUsage]:
    return [decode_usage(fields[b"e"]) for _, fields in await broker.xrange(USAGE_STREAM)]


@pytest.mark.parametrize(
    ("sums", "requests"), [(12, 50), (1, 1), (0, 1), (100, 50)], ids=["tight", "one", "only the first", "ample"]
)
async def test_concurrent_escalations_never_overrun_a_hard_budget(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot, sums: int, requests: int
) -> None:
    for model, prices in (("small", ("1", "2")), ("large", ("10", "20"))):
        await sync_to_async(rate_card)(model, uncached=prices[0], cache_read=prices[0], output=prices[1])
    limit = sums * (2 * LARGE) or LARGE  # the first execution reserves for the most expensive target
    made = await sync_to_async(budget)(amount=limit)
    local_gateway, workers = await gateway(), Workers(broker)
    service = make_service(broker, workers, local_gateway)
    key = ApiKeySnapshot(
        **{name: getattr(key, name) for name in key.__struct_fields__} | {"policies": {"mine": parse(POLICY)}}
    )

    results = await asyncio.gather(*(run(service, key, number) for number in range(requests)))
    await service.drain()

    answered = [active for active in results if isinstance(active, ActiveRequest)]
    escalated = [active for active in answered if len(active.executions) == 2]
    events = [*workers.usage, *await not_started(broker)]
    names = [(event.billing_context.request_id, event.billing_context.execution) for event in events]
    assert len(names) == len(set(names))  # each execution is billed once
    await sync_to_async(settle_events)(*events)
    used = (await sync_to_async(budget_period)(made)).used
    assert used == (len(answered) * SMALL + len(escalated) * LARGE) * 10**6 <= limit * 10**6
    assert all(active.decision_record["escalations"] for active in escalated)
    assert all(active.reserved == [] for active in answered)
    if sums == 100:
        assert len(escalated) == requests
    elif sums:
        assert 1 <= len(escalated) <= requests
        assert set(results) - set(answered) <= {"budget_exceeded"}
    else:  # only the first execution fits, and the request runs without escalation
        assert (len(answered), escalated) == (1, [])
        assert answered[0].decision_record["not_escalating"] == "budget_exceeded"
    await sync_to_async(check_invariants)()
