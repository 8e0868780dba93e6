"""A gateway is killed at each step of a hit of the answer cache: the hit is billed once or not at all."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx2
import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async

from billing.models import BudgetPeriod
from inference_worker.contract.settings import parse_models
from millrace.apps.answer_caches.models import SemanticEvidence
from millrace.apps.answer_caches.semantic_decision import BAND_STARTS
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import ApiKey, Tenant
from tests.support.billing.books import LIST_A, rate_card
from tests.support.gateway.kill_points import HIT_STEPS, SEMANTIC_STEPS
from tests.support.gateway.process_checks import set_budget, settled_events
from tests.support.gateway.processes import EMBEDDING_MODEL, MODEL, GatewayCluster, GatewayProcess, gateway_cluster
from tests.support.rows import unscoped
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("all_models_served")]
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 100,
    "temperature": 0,
}
RECORDED = ("hit recorded", "hit ended")
FIRST, SIMILAR, OTHER = "How do I reset my card?", "How can I reset my card?", "Where is it?"
# The first group is that of the short form of the suite: a step before a hit is recorded, and one after.
SHORT = ["hit found", "hit recorded"]
HIT_GROUPS = [SHORT, [step for step in HIT_STEPS if step not in SHORT]]
SEMANTIC_SHORT = ["hit recorded"]
SEMANTIC_GROUPS = [SEMANTIC_SHORT, [step for step in SEMANTIC_STEPS if step not in SEMANTIC_SHORT]]


def in_groups(groups: list[list[str]]) -> pytest.MarkDecorator:
    """Run a test with each group of steps. A gateway dies at each of them."""
    marks = [(), pytest.mark.extended]
    params = [pytest.param(steps, marks=mark) for steps, mark in zip(groups, marks, strict=True)]
    return pytest.mark.parametrize("steps", params, ids="/".join)


@pytest.fixture
def tenant(table: None) -> Tenant:
    """A committed tenant, and a price list with cached answers."""
    rate_card(**LIST_A, answer_hit_input="0.30", answer_hit_output="1.50")
    rate_card(EMBEDDING_MODEL, uncached="0.02")
    return actions.do_create_tenant("acme", "Acme")


async def send(gateway: GatewayProcess, body: dict[str, Any] = BODY, **headers: str) -> httpx2.Response | None:
    """Send the request, retry on server errors as SDKs do, and return the response, or None if the gateway died."""
    while True:
        try:
            answer = await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        except httpx2.TransportError:
            return None
        if answer.status_code < 500:
            return answer
        await asyncio.sleep(0.2)


@sync_to_async
def reserved() -> int:
    return sum(row.reserved for row in unscoped(BudgetPeriod).all())


@in_groups(HIT_GROUPS)
async def test_a_hit_of_a_killed_gateway_is_billed_once_or_not_at_all(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str, steps: list[str]
) -> None:
    await sync_to_async(actions.do_update_settings)(tenant, answer_cache_seconds=600)
    await set_budget(tenant, 10**15)
    kill_at = {f"victim{number}": step for number, step in enumerate(steps)}
    async with gateway_cluster(async_broker, database, secret, ["a", *kill_at], **kill_at) as inside:
        inside.worker.writes_text = True  # an answer without one is not stored
        inside.worker.may_answer.set()
        a = inside.gateways["a"]
        hits: list[str] = []

        async def is_hit() -> bool:
            answer = await send(a)
            assert answer is not None
            assert answer.status_code == 200, answer.text
            layer = answer.headers["x-millrace-cache"]
            if layer in ("exact", "single_flight"):  # the second while the answer is being stored
                hits.append(answer.headers["x-request-id"])
            return layer == "exact"

        await eventually_async(is_hit)

        async def die(victim: GatewayProcess) -> None:
            await send(victim)

        await assert_billed_once(inside, hits, kill_at, die)


@in_groups(SEMANTIC_GROUPS)
async def test_a_semantic_hit_of_a_killed_gateway_is_billed_once_or_not_at_all(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str, steps: list[str]
) -> None:
    await serve_similar(tenant)
    await sync_to_async(let_replace)(tenant)
    await set_budget(tenant, 10**15)
    kill_at = {f"victim{number}": step for number, step in enumerate(steps)}
    async with gateway_cluster(async_broker, database, secret, ["a", *kill_at], similar=True, **kill_at) as inside:
        inside.worker.may_answer.set()
        a = inside.gateways["a"]
        hits: list[str] = []

        async def is_hit() -> bool:
            for question in (FIRST, OTHER):  # two questions with different answers
                answer = await send(a, question_body(question), **{"x-millrace-cache": "no-cache"})
                assert answer is not None
                assert answer.status_code == 200, answer.text
            # Its answer is not stored, so that it is no exact hit if it is sent again.
            answer = await send(a, question_body(SIMILAR), **{"x-millrace-cache": "no-store"})
            assert answer is not None
            assert answer.status_code == 200, answer.text
            if answer.headers["x-millrace-cache"] == "semantic":
                hits.append(answer.headers["x-request-id"])
            return bool(hits)

        await eventually_async(is_hit)

        async def die(victim: GatewayProcess) -> None:
            """A request whose vector is late on a busy machine is computed, and does not reach the step."""

            async def is_killed() -> bool:
                return await send(victim, question_body(SIMILAR), **{"x-millrace-cache": "no-store"}) is None

            await eventually_async(is_killed)

        await assert_billed_once(inside, hits, kill_at, die)


def let_replace(tenant: Tenant) -> None:
    """Give the tenant's key the scope to replace cached answers."""
    with tenant_scope(tenant):
        (key,) = ApiKey.objects.for_tenant(tenant)
    actions.do_update_api_key(key, scopes=["inference", "models", "cache"])


def question_body(question: str) -> dict[str, Any]:
    return BODY | {"model": "similar", "messages": [{"role": "user", "content": question}]}


@sync_to_async
def serve_similar(tenant: Tenant) -> None:
    """Let the tenant's requests receive the answers to similar questions, as after enough correct checks."""
    actions.do_update_settings(tenant, answer_cache_seconds=600, semantic_cache_max_error_percent=20)
    actions.do_update_settings(tenant, content_retention_days=1)
    actions.do_publish_policy(tenant, "similar", {"rules": [{"targets": [{"model": MODEL}]}], "semantic_cache": True})
    (spec,) = parse_models(f"{EMBEDDING_MODEL}=embedded:minilm")
    with tenant_scope(tenant):
        for band in range(len(BAND_STARTS)):
            SemanticEvidence.objects.create(
                tenant_id=tenant.pk, embedding=spec.key, band=band, correct=1000, updated_at=datetime.now(UTC)
            )


async def assert_billed_once(
    inside: GatewayCluster,
    hits: list[str],
    kill_at: dict[str, str],
    die: Callable[[GatewayProcess], Awaitable[None]],
) -> None:
    """Let the gateways die whose hits are not recorded yet, then the others, and check the bills after each group."""
    for is_recorded in (False, True):
        victims = [inside.gateways[name] for name, step in kill_at.items() if (step in RECORDED) is is_recorded]
        for victim in victims:
            await die(victim)
            await eventually_async(partial(is_dead, victim))
        expected = len(hits) + is_recorded * len(victims)
        await eventually_async(partial(are_billed, expected))
        await asyncio.sleep(1)  # a second event would be settled already
        found = await billed()
        assert len(found) == len(set(found)) == expected
        assert set(hits) <= set(found)


async def is_dead(gateway: GatewayProcess) -> bool:
    return gateway.process.poll() == -signal.SIGKILL


async def billed() -> list[str]:
    """Return the requests of the billed hits."""
    return [event.request_id for event in await settled_events() if event.answer_hit_output]


async def are_billed(number: int) -> bool:
    return len(await billed()) >= number and await reserved() == 0
