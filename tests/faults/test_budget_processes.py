"""Budgets with several gateway processes, which are killed at each step, stopped and resumed. Leases are short."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async

from billing.budgets.budgets import do_remove_budget
from billing.models import Budget, BudgetLease, BudgetPeriod
from millrace.gateway.admission.early_release import CONTENDED_SECONDS
from tenants.models import Tenant
from tests.support.gateway.kill_points import STEPS
from tests.support.gateway.process_checks import (
    codes,
    done,
    passes,
    reservation_of_one,
    see,
    set_budget,
    settled_events,
    used,
)
from tests.support.gateway.processes import (
    LEASE_SECONDS,
    REQUEST_SECONDS,
    GatewayCluster,
    GatewayProcess,
    gateway_cluster,
)
from tests.support.rows import unscoped
from tests.support.waiting import eventually_async

pytestmark = pytest.mark.django_db(transaction=True)
LONG_LEASE_SECONDS = 10.0
GONE_SECONDS = LEASE_SECONDS + REQUEST_SECONDS + 90  # reclaimed by then, also on a busy machine


@sync_to_async
def reserved() -> int:
    return sum(row.reserved for row in unscoped(BudgetPeriod).all())


async def all_apply(budget: Budget, reservation: int, *gateways: GatewayProcess) -> None:
    """Wait until each gateway rejects, by this budget, a request that exceeds it."""

    async def applies(gateway: GatewayProcess) -> bool:
        answer = await gateway.send_request(_tokens(budget.amount + reservation, reservation))
        assert answer is not None
        assert answer.status_code in (200, 429, 503), answer.text
        return answer.status_code == 429 and f"'{budget.name}'" in answer.text

    for gateway in gateways:
        await eventually_async(lambda gateway=gateway: applies(gateway))  # type: ignore[misc]


@pytest.mark.extended  # in one process: tests/integration/gateway/test_budget_admission.py
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_worked_example_7_a_hundred_concurrent_requests_to_three_gateways(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str, rounds: int
) -> None:
    """Exactly ten are admitted, with no settlement before the last admission. Afterwards nothing is reserved."""
    async with gateway_cluster(async_broker, database, secret, "abc", longest=120) as inside:
        reservation = await reservation_of_one(inside)
        gateways = list(inside.gateways.values())
        for number in range(rounds):
            budget = await set_budget(tenant, 10 * reservation + reservation // 2, f"b{number}")
            await all_apply(budget, reservation, *gateways)
            inside.worker.may_answer.clear()
            asked = [asyncio.create_task(gateways[number % 3].send_with_retries()) for number in range(100)]
            await eventually_async(lambda asked=asked: done(asked, 90))  # type: ignore[misc]
            await eventually_async(lambda: has_claimed(inside, 10))
            await see()
            inside.worker.may_answer.set()
            answers = await asyncio.gather(*asked)
            assert codes(answers) == {(200, None): 10, (429, "budget_exceeded"): 90}
            await eventually_async(lambda: is_held(0))
            await see()
            await sync_to_async(do_remove_budget)(budget)


async def test_an_ended_request_releases_budget_before_it_is_settled(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    """The budget has room for one reservation beside earlier usage. Nothing is settled meanwhile. The requests are sent
    to two gateways in turn, each after the last byte of the previous one."""
    async with gateway_cluster(async_broker, database, secret, "ab") as inside:
        reservation = await reservation_of_one(inside)
        a, b = inside.gateways.values()
        await all_settled(inside)
        inside.settler.send_signal(signal.SIGSTOP)
        usage = inside.worker.answered[-1].usage
        cost = -(-(usage.uncached * 3_000_000_000 + usage.output * 15_000_000_000) // 10**6)
        number = 20
        budget = await set_budget(tenant, reservation + (number - 1) * cost)
        await all_apply(budget, reservation, a, b)
        for count in range(number):
            answer = await (a, b)[count % 2].send_with_retries()
            assert answer is not None
            assert answer.status_code == 200, (count, answer.text)
            await see()
        refused = await a.send_with_retries()
        assert refused is not None
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
        assert int(refused.headers["retry-after"]) > 60  # only the next month makes room
        inside.settler.send_signal(signal.SIGCONT)
        await all_settled(inside)
        await eventually_async(lambda: is_held(0))
        assert await used() == number * (usage.uncached * 3_000_000_000 + usage.output * 15_000_000_000)
        events = [each for each in await settled_events() if each.lease_id is not None]
        assert [each.released_by for each in events] == ["gateway"] * number
        await see()


@pytest.mark.extended  # in one process: tests/integration/gateway/test_budget_admission.py
async def test_the_unreleased_part_of_another_gateways_lease_is_recalled(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    """While there is room, a gateway leaves the unused part to the settlement. It releases this part before another
    gateway rejects a request, though nothing is settled."""
    async with gateway_cluster(async_broker, database, secret, "ab", lease=LONG_LEASE_SECONDS, recall=10.0) as inside:
        reservation = await reservation_of_one(inside)
        a, b = inside.gateways.values()
        await all_settled(inside)
        inside.settler.send_signal(signal.SIGSTOP)
        limit = 60 * reservation
        budget = await set_budget(tenant, limit)
        await all_apply(budget, reservation, a, b)
        await asyncio.sleep(CONTENDED_SECONDS + 1)  # it was contended just now
        for _ in range(10):
            assert await passes(await a.send_with_retries())
        usage = inside.worker.answered[-1].usage
        cost = -(-(usage.uncached * 3_000_000_000 + usage.output * 15_000_000_000) // 10**6)
        assert await reserved() > 10 * cost + 10 * (reservation - cost) // 2  # the unused parts are still reserved
        assert await passes(await b.send_with_retries(_tokens(limit - 10 * cost, reservation)))
        await see()
        inside.settler.send_signal(signal.SIGCONT)
        await all_settled(inside)
        await see()


async def has_claimed(inside: GatewayCluster, number: int) -> bool:
    return inside.worker.has_claimed(number)


async def is_held(amount: int) -> bool:
    return await reserved() == amount


@sync_to_async
def lease_of(lease_id: int | None) -> BudgetLease:
    (found,) = [row for row in unscoped(BudgetLease).all() if row.pk == lease_id]
    return found


async def all_settled(inside: GatewayCluster) -> None:
    answered = {event.billing_context.request_id for event in inside.worker.answered}

    async def settled() -> bool:
        return {event.request_id for event in await settled_events()} >= answered

    await eventually_async(settled)


async def test_a_stopped_gateway_delays_requests_but_rejects_none(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    """Four gateways hold leases. Requests that fit are admitted after a recall. While one gateway is stopped, the
    response is 503 with a retry time, and a retry is admitted. The resumed gateway changes nothing."""
    async with gateway_cluster(async_broker, database, secret, "abcd", lease=LONG_LEASE_SECONDS) as inside:
        reservation = await reservation_of_one(inside)
        limit = 70 * reservation
        budget = await set_budget(tenant, limit)
        await all_apply(budget, reservation, *inside.gateways.values())
        a, b, _, d = inside.gateways.values()
        for gateway in inside.gateways.values():
            assert await passes(await gateway.send_with_retries())
        await all_settled(inside)

        # By recall: more than the unleased part, and no more than the unused part.
        left = limit - -(-await used() // 10**6)
        free = left - await reserved()
        async with asyncio.timeout(LONG_LEASE_SECONDS - 2):  # otherwise expired leases make room
            assert await passes(await a.send_with_retries(_tokens((free + left) // 2, reservation)))
        await all_settled(inside)
        await see()

        # While one is stopped: requests that need its part get 503, others are admitted or get 429.
        for gateway in (a, b):
            assert await passes(await gateway.send_with_retries())
        its = await stop_with_a_lease(inside, d)
        left = limit - -(-await used() // 10**6)
        big = _tokens(left - its.money // 2, reservation)
        began = time.monotonic()
        refused = await a.send_request(big)
        assert refused is not None
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        comes_back = float(refused.headers["retry-after"])
        assert 1 <= comes_back <= LONG_LEASE_SECONDS + REQUEST_SECONDS + 2
        assert await passes(await b.send_with_retries())
        never = await b.send_with_retries(_tokens(left + reservation, reservation))
        assert never is not None
        assert (never.status_code, never.json()["error"]["code"]) == (429, "budget_exceeded")
        await all_settled(inside)
        await see()

        await asyncio.sleep(max(0.0, began + comes_back - time.monotonic()))
        left = limit - -(-await used() // 10**6)
        big = _tokens(left - its.money // 2, reservation)
        await eventually_async(lambda: _is_admitted(a, big))  # the reclaimer runs every second
        await all_settled(inside)
        await see()

        d.signal(signal.SIGCONT)
        assert await passes(await d.send_with_retries(1))
        await all_settled(inside)
        assert inside.worker.answered[-1].billing_context.lease_id != its.pk
        await eventually_async(lambda: is_held_by_none(its))
        await see()


async def stop_with_a_lease(inside: GatewayCluster, gateway: GatewayProcess) -> BudgetLease:
    """Stop the gateway while it has a lease with an unused part, not right after a recall or at a lease's end."""
    while True:
        assert await passes(await gateway.send_with_retries())
        await all_settled(inside)
        gateway.signal(signal.SIGSTOP)
        found = await lease_of(inside.worker.answered[-1].billing_context.lease_id)
        if found.open and found.money:
            return found
        gateway.signal(signal.SIGCONT)
        await asyncio.sleep(0.2)


async def is_held_by_none(lease: BudgetLease) -> bool:
    found = await lease_of(lease.pk)
    return (found.money, found.requests, found.open, found.fencing_token) == (0, 0, False, lease.fencing_token + 1)


async def has_ended(gateway: GatewayProcess) -> bool:
    return gateway.process.poll() is not None


async def _is_admitted(gateway: Any, tokens: int) -> bool:
    return await passes(await gateway.send_request(tokens))


def _tokens(nano: int, reservation: int) -> int:
    """Return the output tokens for which a request reserves at most `nano`; it reserves `reservation` with 100."""
    return (nano - (reservation - 100 * 15_000)) // 15_000


# The second group has a step of each phase: lease, dispatch, recall and release.
STEP_GROUPS = [pytest.param(list(STEPS)[start::3], marks=[pytest.mark.extended] * (start != 1)) for start in range(3)]


@pytest.mark.parametrize("steps", STEP_GROUPS, ids="/".join)
async def test_a_gateway_killed_at_any_step_leaves_consistent_budgets(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str, steps: list[str]
) -> None:
    """Invariants 1 to 7 hold immediately. After the end of its lease and its requests, nothing is reserved and the
    unused budget is available (worked example 9 of the specification, for every step)."""
    kill_at = {f"victim{number}": step for number, step in enumerate(steps)}
    async with gateway_cluster(async_broker, database, secret, ["healthy", *kill_at], **kill_at) as inside:
        reservation = await reservation_of_one(inside)
        budget = await set_budget(tenant, limit := 60 * reservation)
        assert budget.pending_gateways == ()
        healthy = inside.gateways["healthy"]
        for name, step in kill_at.items():
            victim = inside.gateways[name]
            answer = await victim.send_with_retries()
            if answer is None and step in ("releasing", "released"):
                pass  # the budget was contended, so it died before the last byte
            elif step in ("recalled", "returning", "returned", "releasing", "released"):
                assert answer is not None, step
                assert answer.status_code == 200, answer.text
                await all_settled(inside)
                free = limit - -(-await used() // 10**6) - await reserved()
                await healthy.send_request(
                    _tokens(free + reservation, reservation)
                )  # some of its reservations must be released for that
            else:
                assert answer is None, step
            await eventually_async(lambda victim=victim: has_ended(victim))  # type: ignore[misc]
            assert victim.process.returncode == -signal.SIGKILL, step
            await see()
        async with asyncio.timeout(GONE_SECONDS):
            while await reserved():
                await see()
                await asyncio.sleep(0.5)
        await see()
        assert len({event.request_id for event in await settled_events()}) == len(await settled_events())
        left = limit - -(-await used() // 10**6)
        assert await passes(await healthy.send_with_retries(_tokens(left, reservation)))
        await all_settled(inside)
        await see()
