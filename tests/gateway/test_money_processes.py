"""Budgets before real gateway processes: killed at each step, stopped and resumed, all at once. The lease is short."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async
from django.db import connection

from billing.actions.budgets import do_make_budget, do_remove_budget
from billing.models import Budget, Slice, UsageEvent, Window
from tenants import actions
from tenants.models import Tenant
from tests.balance import assert_books_balance
from tests.billing.books import sheet
from tests.gateway import test_money
from tests.gateway.house import LEASE_SECONDS, REQUEST_SECONDS, GatewayProcess, House, house
from tests.gateway.killing import STEPS
from tests.gateway.test_money import database_url
from tests.seeing import Everybody, only_project

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.fault, pytest.mark.timeout(300)]
table = test_money.table
GONE_SECONDS = LEASE_SECONDS + REQUEST_SECONDS + 20  # and by then it has been reaped, on a busy machine too
see = sync_to_async(lambda: assert_books_balance(database_url()))


@pytest.fixture
def tenant(table: None) -> Tenant:
    sheet()
    return actions.do_create_tenant("acme", "Acme")


@pytest.fixture
def secret(tenant: Tenant) -> str:
    return actions.do_create_api_key(only_project(tenant), "k")[1]


@pytest.fixture
def database() -> str:
    """For processes of their own."""
    return urlunsplit(
        urlsplit(os.environ["MILLRACE_DATABASE_URL"])._replace(path=f"/{connection.settings_dict['NAME']}")
    )


async def eventually(true: Callable[[], Awaitable[Any]], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not await true():
            await asyncio.sleep(0.05)


@sync_to_async
def set_budget(tenant: Tenant, amount: int, **fields: Any) -> Budget:
    return do_make_budget(tenant, name="b", unit="money", period="month", amount=amount, **fields)


@sync_to_async
def held() -> int:
    return sum(each.held for each in Everybody(Window).all())


@sync_to_async
def used() -> int:
    return int(sum(each.used for each in Everybody(Window).all()))


async def hold_of_one(inside: House) -> int:
    """What a request of 100 tokens holds; asked without any budget."""
    inside.worker.may_answer.set()
    gateway = next(iter(inside.gateways.values()))
    answer = await gateway.ask()
    assert answer is not None
    assert answer.status_code == 200, answer.text
    return int(inside.worker.answered[-1].envelope.hold or 0)


async def all_heard(inside: House) -> None:
    """Gateways hear of a new budget within a second; on a busy machine too by then."""
    await asyncio.sleep(3)


def codes(answers: list[Any]) -> Counter[Any]:
    return Counter((each.status_code, each.json().get("error", {}).get("code")) for each in answers)


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_worked_example_7_a_hundred_at_once_before_three_gateways(
    broker: redis.Redis, tenant: Tenant, secret: str, database: str, rounds: int
) -> None:
    """Exactly ten are admitted, none settling before the last admission; then nothing is held."""
    async with house(broker, database, secret, "abc") as inside:
        hold = await hold_of_one(inside)
        for _ in range(rounds):
            inside.worker.may_answer.clear()
            budget = await set_budget(tenant, 10 * hold + hold // 2)
            await all_heard(inside)
            gateways = list(inside.gateways.values())
            asked = [asyncio.create_task(gateways[number % 3].ask()) for number in range(100)]
            await eventually(lambda asked=asked: done(asked, 90))  # type: ignore[misc]
            await eventually(lambda: has_claimed(inside, 10))
            await see()
            inside.worker.may_answer.set()
            answers = await asyncio.gather(*asked)
            assert codes(answers) == {(200, None): 10, (429, "budget_exceeded"): 90}
            await eventually(lambda: is_held(0))
            await see()
            await sync_to_async(do_remove_budget)(budget)


async def done(asked: list[asyncio.Task[Any]], number: int) -> bool:
    return sum(each.done() for each in asked) >= number


async def has_claimed(inside: House, number: int) -> bool:
    return len(inside.worker.claimed) >= number


async def is_held(amount: int) -> bool:
    return await held() == amount


@sync_to_async
def slices_of(since: int) -> list[Slice]:
    """Open slices made after that one, oldest first."""
    return [each for each in Everybody(Slice).all() if each.open and each.pk > since]


@sync_to_async
def newest_slice() -> int:
    return max((each.pk for each in Everybody(Slice).all()), default=0)


@sync_to_async
def settled_events() -> list[UsageEvent]:
    return list(Everybody(UsageEvent).all())


async def all_settled(inside: House) -> None:
    async def settled() -> bool:
        return len(await settled_events()) == len(inside.worker.answered)

    await eventually(settled)


async def passes(answer: Any) -> bool:
    assert answer is not None
    return bool(answer.status_code == 200)


async def test_a_stopped_gateway_delays_and_never_denies(
    broker: redis.Redis, tenant: Tenant, secret: str, database: str
) -> None:
    """Four gateways hold slices. What fits is admitted, by recall. With one of them stopped by SIGSTOP the answer is
    503 and when to come back, and then it is admitted; the stopped one, once it goes on, changes nothing."""
    async with house(broker, database, secret, "abcd") as inside:
        hold = await hold_of_one(inside)
        limit = 80 * hold
        await set_budget(tenant, limit)
        await all_heard(inside)
        a, b, _, d = inside.gateways.values()
        for gateway in inside.gateways.values():
            assert await passes(await gateway.ask())
        await all_settled(inside)

        # By recall: more than what is not leased, and no more than what is not used.
        left = limit - -(-await used() // 10**6)
        free = left - await held()
        assert await passes(await a.ask(_tokens((free + left) // 2, hold)))
        await all_settled(inside)
        await see()

        await asyncio.sleep(0.5)  # after a recall gateways take no more than they need for a moment

        # One is stopped. What needs its part may come back, what does not passes, what never fits is told so.
        for gateway in (a, b):
            assert await passes(await gateway.ask())
        before = await newest_slice()
        assert await passes(await d.ask())
        await all_settled(inside)
        (its,) = await slices_of(before)
        assert its.money > 0
        d.signal(signal.SIGSTOP)
        left = limit - -(-await used() // 10**6)
        big = _tokens(left - its.money // 2, hold)
        began = time.monotonic()
        refused = await a.ask(big)
        assert refused is not None
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        comes_back = float(refused.headers["retry-after"])
        assert 1 <= comes_back <= LEASE_SECONDS + REQUEST_SECONDS + 2
        assert await passes(await b.ask())
        never = await b.ask(_tokens(left + hold, hold))
        assert never is not None
        assert (never.status_code, never.json()["error"]["code"]) == (429, "budget_exceeded")
        await all_settled(inside)
        await see()

        await asyncio.sleep(max(0.0, began + comes_back - time.monotonic()))
        left = limit - -(-await used() // 10**6)
        big = _tokens(left - its.money // 2, hold)
        await eventually(lambda: _asked(a, big))  # the reaper looks each second
        await all_settled(inside)
        await see()

        d.signal(signal.SIGCONT)
        assert await passes(await d.ask(1))
        await all_settled(inside)
        assert its.pk not in {each.slice_id for each in (await settled_events())[-1:]}
        await eventually(lambda: is_held_by_none(its.pk))
        await see()


async def is_held_by_none(slice_id: int) -> bool:
    (found,) = [each for each in await sync_to_async(Everybody(Slice).all)() if each.pk == slice_id]
    return (found.money, found.requests, found.open, found.fence) == (0, 0, False, 2)


async def has_ended(gateway: GatewayProcess) -> bool:
    return gateway.process.poll() is not None


async def _asked(gateway: Any, tokens: int) -> bool:
    return await passes(await gateway.ask(tokens))


def _tokens(nano: int, hold: int) -> int:
    """Of an answer, so that it and the prompt of a request that holds `hold` with 100 hold at most so much."""
    return (nano - (hold - 100 * 15_000)) // 15_000


@pytest.mark.parametrize("steps", [list(STEPS)[start::3] for start in range(3)], ids="/".join)
async def test_a_gateway_killed_at_any_step_leaves_books_that_balance(
    broker: redis.Redis, tenant: Tenant, secret: str, database: str, steps: list[str]
) -> None:
    """Invariants 1 to 7 hold at once, and when its lease has ended and its requests must have, nothing is held and all
    that was not used can be had: worked example 9, for every step."""
    kill_at = {f"victim{number}": step for number, step in enumerate(steps)}
    async with house(broker, database, secret, ["healthy", *kill_at], **kill_at) as inside:
        hold = await hold_of_one(inside)
        budget = await set_budget(tenant, limit := 60 * hold)
        await all_heard(inside)
        healthy = inside.gateways["healthy"]
        for name, step in kill_at.items():
            victim = inside.gateways[name]
            answer = await victim.ask()
            if step in ("recalled", "returning", "returned"):
                assert answer is not None, step
                assert answer.status_code == 200, answer.text
                await all_settled(inside)
                free = limit - -(-await used() // 10**6) - await held()
                await healthy.ask(_tokens(free + hold, hold))  # some of what it holds must come back for that
            else:
                assert answer is None, step
            await eventually(lambda victim=victim: has_ended(victim), 10)  # type: ignore[misc]
            assert victim.process.returncode == -signal.SIGKILL, step
            await see()
        async with asyncio.timeout(GONE_SECONDS):
            while await held():
                await see()
                await asyncio.sleep(0.5)
        await see()
        assert len({each.request_id for each in await settled_events()}) == len(await settled_events())
        left = limit - -(-await used() // 10**6)
        assert await passes(await healthy.ask(_tokens(left, hold)))
        await all_settled(inside)
        assert budget.pk
        await see()
