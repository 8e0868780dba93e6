"""Budgets before real gateway processes: killed at each step, stopped and resumed, all at once. The lease is short."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async

from billing.actions.budgets import do_remove_budget
from billing.models import Budget, BudgetLease, BudgetPeriod
from millrace.gateway.admission.early_release import CONTENDED_SECONDS
from tenants.models import Tenant
from tests.support.gateway.kill_points import STEPS
from tests.support.gateway.process_checks import (
    codes,
    done,
    eventually,
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

pytestmark = pytest.mark.django_db(transaction=True)
LONG_LEASE_SECONDS = 10.0
GONE_SECONDS = LEASE_SECONDS + REQUEST_SECONDS + 90  # and by then it has been reclaimed, on a busy machine too


@sync_to_async
def reserved() -> int:
    return sum(each.reserved for each in unscoped(BudgetPeriod).all())


async def all_know(budget: Budget, reservation: int, *gateways: GatewayProcess) -> None:
    """Wait until each of these refuses, by that budget, what is more than all of it."""

    async def knows(gateway: GatewayProcess) -> bool:
        answer = await gateway.ask(_tokens(budget.amount + reservation, reservation))
        assert answer is not None
        assert answer.status_code in (200, 429, 503), answer.text
        return answer.status_code == 429 and f"'{budget.name}'" in answer.text

    for gateway in gateways:
        await eventually(lambda gateway=gateway: knows(gateway))  # type: ignore[misc]


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_worked_example_7_a_hundred_at_once_before_three_gateways(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str, rounds: int
) -> None:
    """Exactly ten are admitted, none settling before the last admission; then nothing is held."""
    async with gateway_cluster(async_broker, database, secret, "abc", longest=120) as inside:
        reservation = await reservation_of_one(inside)
        gateways = list(inside.gateways.values())
        for number in range(rounds):
            budget = await set_budget(tenant, 10 * reservation + reservation // 2, f"b{number}")
            await all_know(budget, reservation, *gateways)
            inside.worker.may_answer.clear()
            asked = [asyncio.create_task(gateways[number % 3].ask_with_retries()) for number in range(100)]
            await eventually(lambda asked=asked: done(asked, 90))  # type: ignore[misc]
            await eventually(lambda: has_claimed(inside, 10))
            await see()
            inside.worker.may_answer.set()
            answers = await asyncio.gather(*asked)
            assert codes(answers) == {(200, None): 10, (429, "budget_exceeded"): 90}
            await eventually(lambda: is_held(0))
            await see()
            await sync_to_async(do_remove_budget)(budget)


async def test_an_ended_request_makes_room_for_the_next_before_it_is_settled(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    """The budget has room for one reservation beside what the others used. Nothing is settled meanwhile, and the
    requests go to two gateways in turn, each after the last byte of the one before."""
    async with gateway_cluster(async_broker, database, secret, "ab") as inside:
        reservation = await reservation_of_one(inside)
        a, b = inside.gateways.values()
        await all_settled(inside)
        inside.settler.send_signal(signal.SIGSTOP)
        usage = inside.worker.answered[-1].usage
        cost = -(-(usage.uncached * 3_000_000_000 + usage.output * 15_000_000_000) // 10**6)
        number = 20
        budget = await set_budget(tenant, reservation + (number - 1) * cost)
        await all_know(budget, reservation, a, b)
        for count in range(number):
            answer = await (a, b)[count % 2].ask()
            assert answer is not None
            assert answer.status_code == 200, (count, answer.text)
            await see()
        refused = await a.ask()
        assert refused is not None
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
        assert int(refused.headers["retry-after"]) > 60  # nothing but the next month makes room
        inside.settler.send_signal(signal.SIGCONT)
        await all_settled(inside)
        await eventually(lambda: is_held(0))
        assert await used() == number * (usage.uncached * 3_000_000_000 + usage.output * 15_000_000_000)
        events = [each for each in await settled_events() if each.lease_id is not None]
        assert [each.released_by for each in events] == ["gateway"] * number
        await see()


async def test_what_another_gateway_has_not_released_is_recalled(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    """While there is room, a gateway leaves the unused part to the settlement. It releases it before another gateway
    rejects a request, though nothing is settled."""
    async with gateway_cluster(async_broker, database, secret, "ab", lease=LONG_LEASE_SECONDS, recall=10.0) as inside:
        reservation = await reservation_of_one(inside)
        a, b = inside.gateways.values()
        await all_settled(inside)
        inside.settler.send_signal(signal.SIGSTOP)
        limit = 60 * reservation
        budget = await set_budget(tenant, limit)
        await all_know(budget, reservation, a, b)
        await asyncio.sleep(CONTENDED_SECONDS + 1)  # it was contended just now
        for _ in range(10):
            assert await passes(await a.ask_with_retries())
        usage = inside.worker.answered[-1].usage
        cost = -(-(usage.uncached * 3_000_000_000 + usage.output * 15_000_000_000) // 10**6)
        assert await reserved() > 10 * cost + 10 * (reservation - cost) // 2  # the unused parts are reserved still
        assert await passes(await b.ask_with_retries(_tokens(limit - 10 * cost, reservation)))
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
    (found,) = [each for each in unscoped(BudgetLease).all() if each.pk == lease_id]
    return found


async def all_settled(inside: GatewayCluster) -> None:
    answered = {event.billing_context.request_id for event in inside.worker.answered}

    async def settled() -> bool:
        return {each.request_id for each in await settled_events()} >= answered

    await eventually(settled)


async def test_a_stopped_gateway_delays_and_never_denies(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    """Four gateways hold leases. What fits is admitted, by recall. With one of them stopped by SIGSTOP the answer is
    503 and when to come back, and then it is admitted; the stopped one, once it continues, changes nothing."""
    async with gateway_cluster(async_broker, database, secret, "abcd", lease=LONG_LEASE_SECONDS) as inside:
        reservation = await reservation_of_one(inside)
        limit = 70 * reservation
        budget = await set_budget(tenant, limit)
        await all_know(budget, reservation, *inside.gateways.values())
        a, b, _, d = inside.gateways.values()
        for gateway in inside.gateways.values():
            assert await passes(await gateway.ask_with_retries())
        await all_settled(inside)

        # By recall: more than what is not leased, and no more than what is not used.
        left = limit - -(-await used() // 10**6)
        free = left - await reserved()
        async with asyncio.timeout(LONG_LEASE_SECONDS - 2):  # else leases end, and it passes by that
            assert await passes(await a.ask_with_retries(_tokens((free + left) // 2, reservation)))
        await all_settled(inside)
        await see()

        # One is stopped. What needs its part may come back, what does not passes, what never fits is told so.
        for gateway in (a, b):
            assert await passes(await gateway.ask_with_retries())
        its = await stop_with_a_lease(inside, d)
        left = limit - -(-await used() // 10**6)
        big = _tokens(left - its.money // 2, reservation)
        began = time.monotonic()
        refused = await a.ask(big)
        assert refused is not None
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        comes_back = float(refused.headers["retry-after"])
        assert 1 <= comes_back <= LONG_LEASE_SECONDS + REQUEST_SECONDS + 2
        assert await passes(await b.ask_with_retries())
        never = await b.ask_with_retries(_tokens(left + reservation, reservation))
        assert never is not None
        assert (never.status_code, never.json()["error"]["code"]) == (429, "budget_exceeded")
        await all_settled(inside)
        await see()

        await asyncio.sleep(max(0.0, began + comes_back - time.monotonic()))
        left = limit - -(-await used() // 10**6)
        big = _tokens(left - its.money // 2, reservation)
        await eventually(lambda: _asked(a, big))  # the reclaimer looks each second
        await all_settled(inside)
        await see()

        d.signal(signal.SIGCONT)
        assert await passes(await d.ask_with_retries(1))
        await all_settled(inside)
        assert inside.worker.answered[-1].billing_context.lease_id != its.pk
        await eventually(lambda: is_held_by_none(its.pk))
        await see()


async def stop_with_a_lease(inside: GatewayCluster, gateway: GatewayProcess) -> BudgetLease:
    """Stop it while it has a lease of which something is left: not for a moment after a recall, nor as a lease ends."""
    while True:
        assert await passes(await gateway.ask_with_retries())
        await all_settled(inside)
        gateway.signal(signal.SIGSTOP)
        found = await lease_of(inside.worker.answered[-1].billing_context.lease_id)
        if found.open and found.money:
            return found
        gateway.signal(signal.SIGCONT)
        await asyncio.sleep(0.2)


async def is_held_by_none(lease_id: int) -> bool:
    found = await lease_of(lease_id)
    return (found.money, found.requests, found.open, found.fencing_token) == (0, 0, False, 2)


async def has_ended(gateway: GatewayProcess) -> bool:
    return gateway.process.poll() is not None


async def _asked(gateway: Any, tokens: int) -> bool:
    return await passes(await gateway.ask(tokens))


def _tokens(nano: int, reservation: int) -> int:
    """Of an answer, so that it and the prompt of a request that reserves `reservation` with 100 reserve at most so
    much."""
    return (nano - (reservation - 100 * 15_000)) // 15_000


@pytest.mark.parametrize("steps", [list(STEPS)[start::3] for start in range(3)], ids="/".join)
async def test_a_gateway_killed_at_any_step_leaves_books_that_balance(
    async_broker: redis.Redis, tenant: Tenant, secret: str, database: str, steps: list[str]
) -> None:
    """Invariants 1 to 7 hold at once, and when its lease has ended and its requests must have, nothing is held and all
    that was not used can be had: worked example 9, for every step."""
    kill_at = {f"victim{number}": step for number, step in enumerate(steps)}
    async with gateway_cluster(async_broker, database, secret, ["healthy", *kill_at], **kill_at) as inside:
        reservation = await reservation_of_one(inside)
        budget = await set_budget(tenant, limit := 60 * reservation)
        assert budget.pending_gateways == ()
        healthy = inside.gateways["healthy"]
        for name, step in kill_at.items():
            victim = inside.gateways[name]
            answer = await victim.ask_with_retries()
            if answer is None and step in ("releasing", "released"):
                pass  # the budget was contended, so it died before the last byte
            elif step in ("recalled", "returning", "returned", "releasing", "released"):
                assert answer is not None, step
                assert answer.status_code == 200, answer.text
                await all_settled(inside)
                free = limit - -(-await used() // 10**6) - await reserved()
                await healthy.ask(
                    _tokens(free + reservation, reservation)
                )  # some of what it holds must come back for that
            else:
                assert answer is None, step
            await eventually(lambda victim=victim: has_ended(victim))  # type: ignore[misc]
            assert victim.process.returncode == -signal.SIGKILL, step
            await see()
        async with asyncio.timeout(GONE_SECONDS):
            while await reserved():
                await see()
                await asyncio.sleep(0.5)
        await see()
        assert len({each.request_id for each in await settled_events()}) == len(await settled_events())
        left = limit - -(-await used() // 10**6)
        assert await passes(await healthy.ask_with_retries(_tokens(left, reservation)))
        await all_settled(inside)
        await see()
