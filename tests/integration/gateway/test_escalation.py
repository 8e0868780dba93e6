"""Escalation under a hard budget: the sum of all executions is reserved first, and each is billed at its own price."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async

from inference_worker.contract.messages import End
from inference_worker.contract.request import SamplingParams
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.protocols.openai import completions
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.policy import parse
from tests.support.billing.books import rate_card
from tests.support.gateway.budgets import budget_period, check_invariants, settle_events
from tests.support.gateway.escalations import LARGE, OUTPUT, PROMPT, SMALL, Workers, make_service, not_started
from tests.support.gateway.services import find_opened, recorded

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
POLICY = {
    "rules": [
        {
            "targets": [{"model": "small"}, {"model": "large"}],
            "strategy": "ordered",
            "escalate": {"on": ["pattern"], "pattern": "good"},
        }
    ]
}


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
    assert all(recorded(active)["escalations"] for active in escalated)
    assert all(find_opened(active, "escalation").reserved == [] for active in answered)
    if sums == 100:
        assert len(escalated) == requests
    elif sums:
        assert 1 <= len(escalated) <= requests
        assert set(results) - set(answered) <= {"budget_exceeded"}
    else:  # only the first execution fits, and the request runs without escalation
        assert (len(answered), escalated) == (1, [])
        assert recorded(answered[0])["not_escalating"] == "budget_exceeded"
    await sync_to_async(check_invariants)()
