"""A gateway is killed at each step of a hit of the answer cache: the hit is billed once or not at all."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async

from billing.models import BudgetPeriod
from tenants import actions
from tenants.models import Tenant
from tests.support.billing.books import LIST_A, rate_card
from tests.support.gateway.kill_points import HIT_STEPS
from tests.support.gateway.process_checks import eventually, set_budget, settled_events
from tests.support.gateway.processes import MODEL, GatewayProcess, gateway_cluster
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db(transaction=True)
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 100,
    "temperature": 0,
}
RECORDED = ("hit recorded", "hit ended")


@pytest.fixture
def tenant(table: None) -> Tenant:
    """A committed tenant, and a price list with cached answers."""
    rate_card(**LIST_A, answer_hit_input="0.30", answer_hit_output="1.50")
    return actions.do_create_tenant("acme", "Acme")


async def send(gateway: GatewayProcess) -> httpx.Response | None:
    """Send the request, retry on 503 as SDKs do, and return the response, or None if the gateway died."""
    while True:
        try:
            answer = await gateway.client.post("/v1/chat/completions", json=BODY)
        except httpx.TransportError:
            return None
        if answer.status_code != 503:
            return answer
        await asyncio.sleep(0.2)


@sync_to_async
def reserved() -> int:
    return sum(row.reserved for row in unscoped(BudgetPeriod).all())


@pytest.mark.parametrize("step", HIT_STEPS)
async def test_a_hit_of_a_killed_gateway_is_billed_once_or_not_at_all(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str, step: str
) -> None:
    await sync_to_async(actions.do_set_answer_cache)(tenant, seconds=600)
    await set_budget(tenant, 10**15)
    async with gateway_cluster(async_broker, database, secret, "ab", b=step) as inside:
        inside.worker.may_answer.set()
        a, b = inside.gateways.values()
        hits: list[str] = []

        async def is_hit() -> bool:
            answer = await send(a)
            assert answer is not None
            assert answer.status_code == 200, answer.text
            if answer.headers["x-millrace-cache"] == "exact":
                hits.append(answer.headers["x-request-id"])
            return bool(hits)

        await eventually(is_hit)
        await send(b)

        async def is_dead() -> bool:
            return b.process.poll() == -signal.SIGKILL

        await eventually(is_dead)

        async def billed() -> list[str]:
            return [event.request_id for event in await settled_events() if event.answer_hit_output]

        expected = len(hits) + (step in RECORDED)

        async def is_billed() -> bool:
            return len(await billed()) >= expected and await reserved() == 0

        await eventually(is_billed)
        await asyncio.sleep(1)  # a second event would be settled already
        found = await billed()
        assert len(found) == len(set(found)) == expected
        assert set(hits) <= set(found)
