"""Propagation of budgets: a new or lowered budget is active in every live gateway before the API responds."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import redis
import redis.asyncio
from asgiref.sync import sync_to_async
from django.db import transaction
from django.test import Client

from billing.budgets.budgets import do_change_budget, do_make_budget
from billing.models import Budget
from tenants import actions
from tenants.models import Tenant
from tenants.outbox.change_feed import GATEWAYS_KEY, gateway_heartbeat_key
from tests.support.gateway import process_checks
from tests.support.gateway.budget_gateways import Admitted
from tests.support.gateway.budgets import RESERVED, admit_requests, change
from tests.support.gateway.process_checks import (
    codes,
    done,
    passes,
    reservation_of_one,
    see,
    set_budget,
    settled_events,
)
from tests.support.gateway.processes import GatewayCluster, gateway_cluster
from tests.support.rows import only_project
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table"), pytest.mark.timeout(300)]
REQUESTS = 30


async def count_admitted(inside: GatewayCluster, fit: int) -> None:
    """Send many requests to all gateways, with no settlement meanwhile, and return the number admitted."""
    inside.worker.may_answer.clear()
    gateways = list(inside.gateways.values())
    asked = [asyncio.create_task(gateways[number % len(gateways)].send_with_retries()) for number in range(REQUESTS)]
    await eventually_async(lambda: done(asked, REQUESTS - fit))
    inside.worker.may_answer.set()
    answers = await asyncio.gather(*asked)
    assert codes(answers) == {(200, None): fit, (429, "budget_exceeded"): REQUESTS - fit}
    await see()


async def test_a_budget_applies_to_the_next_requests(
    broker: redis.asyncio.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    async with gateway_cluster(broker, database, secret, "ab", longest=120, poll=60) as inside:
        reservation = await reservation_of_one(inside)
        for gateway in inside.gateways.values():
            assert await passes(await gateway.send_with_retries())  # each has read its budgets and found none
        budget = await set_budget(tenant, 3 * reservation + reservation // 2)
        assert budget.pending_gateways == ()
        await count_admitted(inside, 3)
        await eventually_async(lambda: is_settled(inside))
        used = await process_checks.used() // 10**6 + 1
        raised = await sync_to_async(do_change_budget)(budget, amount=10**12)
        for gateway in inside.gateways.values():
            assert await passes(await gateway.send_with_retries())  # it has leased from the raised budget
        await eventually_async(lambda: is_settled(inside))
        lowered = await sync_to_async(do_change_budget)(raised, amount=used + 5 * reservation)
        assert lowered.pending_gateways == ()
        left = used + 5 * reservation - await process_checks.used() // 10**6
        await count_admitted(inside, left // reservation)


async def is_settled(inside: GatewayCluster) -> bool:
    answered = {event.billing_context.request_id for event in inside.worker.answered}
    return {each.request_id for each in await settled_events()} >= answered


async def test_a_stopped_gateway_is_reported_and_applies_the_budget_when_resumed(
    broker: redis.asyncio.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    async with gateway_cluster(broker, database, secret, "ab") as inside:
        reservation = await reservation_of_one(inside)
        a, b = inside.gateways.values()
        for gateway in (a, b):
            assert await passes(await gateway.send_with_retries())
        live = {name async for name in _live(broker)}
        assert len(live) == 2
        b.signal(signal.SIGSTOP)
        budget = await set_budget(tenant, reservation // 2)
        (pending,) = budget.pending_gateways or ()
        assert pending in live
        refused = await a.send_request()
        assert refused is not None
        assert refused.status_code == 429
        await asyncio.sleep(1)  # longer than a read of the change log is valid
        asking = asyncio.create_task(b.send_with_retries())
        await asyncio.sleep(0.2)  # the request waits in its socket
        b.signal(signal.SIGCONT)
        refused = await asking
        assert refused is not None
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
        again: Budget = await sync_to_async(do_change_budget)(budget, amount=reservation // 3)
        assert again.pending_gateways == ()
        await see()


async def _live(broker: redis.asyncio.Redis) -> Any:
    for name in await broker.smembers(GATEWAYS_KEY):  # type: ignore[misc]
        if await broker.exists(gateway_heartbeat_key(name.decode())):
            yield name.decode()


async def test_without_the_change_log_each_request_reads_its_budgets(gateway: Any, budget: Any) -> None:
    """So a gateway that continues after a pause admits nothing by an old limit or without a new budget."""
    made = await sync_to_async(budget)(amount=100 * RESERVED)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    local_gateway.budget_admission.note_poll(float("-inf"))
    await sync_to_async(change)(made, amount=2 * RESERVED)
    local_gateway.budget_admission.note_poll(float("-inf"))
    found = [await local_gateway.admit() for _ in range(2)]
    assert [isinstance(each, Admitted) for each in found] == [True, False]
    await sync_to_async(change)(made, amount=100 * RESERVED)
    await sync_to_async(budget)(name="calls", unit="requests", amount=1)
    found = [await local_gateway.admit() for _ in range(2)]
    assert [isinstance(each, Admitted) for each in found] == [True, False]
    await see()


@pytest.mark.parametrize("idempotency", [None, "once"])
def test_the_response_names_gateways_that_have_not_applied_the_budget(
    tenant: Tenant, client: Client, idempotency: str | None
) -> None:
    _, secret = actions.do_create_api_key(only_project(tenant), "m", scopes=["manage"])
    headers = {"authorization": f"Bearer {secret}"} | ({"idempotency-key": idempotency} if idempotency else {})
    fields = {"name": "b", "unit": "money", "period": "month", "amount": 10**9}

    def post() -> Any:
        return client.post("/api/budgets", fields, content_type="application/json", headers=headers)

    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as valkey:
        valkey.flushdb()
        valkey.sadd(GATEWAYS_KEY, "gw-silent", "gw-gone")
        valkey.set(gateway_heartbeat_key("gw-silent"), b"", ex=60)
        answer = post()
        assert answer.status_code == 201, answer.content
        assert answer.json()["pending_gateways"] == ["gw-silent"]
        if idempotency:
            assert post().json() == answer.json() | {"pending_gateways": None}
        url = f"/api/budgets/{answer.json()['id']}"
        changed = client.patch(url, {"amount": 5}, content_type="application/json", headers=headers)
        assert changed.json()["pending_gateways"] == ["gw-silent"]
        valkey.delete(gateway_heartbeat_key("gw-silent"))
        changed = client.patch(url, {"amount": 6}, content_type="application/json", headers=headers)
        assert changed.json()["pending_gateways"] == []
        assert "pending_gateways" not in client.get(url, headers=headers).json()


def test_without_valkey_the_propagation_is_unknown(tenant: Tenant, settings: Any) -> None:
    settings.MILLRACE = replace(settings.MILLRACE, valkey_url="redis://127.0.0.1:1")
    made = do_make_budget(tenant, name="b", unit="money", period="month", amount=5)
    assert made.pending_gateways is None


def test_in_an_outer_transaction_the_api_does_not_wait(tenant: Tenant) -> None:
    """A gateway cannot apply an uncommitted change."""
    with transaction.atomic():
        made = do_make_budget(tenant, name="b", unit="money", period="month", amount=5)
        assert made.pending_gateways is None
    assert made.pending_gateways == ()
