"""Edge cases of budgets: time gaps, slow and lost responses, concurrent changes, and contention."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async

from billing.models import Budget, BudgetLease, BudgetPeriod
from billing.rates.pricing import Component, Rate, RateCard, Tier
from billing.reservations import budget_leases, reservations
from billing.reservations.budget_leases import ReservedAmount
from millrace.gateway.admission import budget_admission
from millrace.gateway.admission.cost_estimate import CostEstimate
from millrace.gateway.core.errors import ApiError
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.outbox.change_feed import ChangeEvent
from tests.support.gateway.budget_gateways import MODEL, Admitted, BudgetGateway, Meeting, admit_elsewhere, key_of
from tests.support.gateway.budgets import (
    DOLLAR,
    RESERVED,
    admit_requests,
    budget_period,
    change,
    check_invariants,
    drop_revocations,
    reclaim_all,
    see,
    settle_events,
)
from tests.support.gateway.keys import make_demand
from tests.support.rows import only_project, unscoped
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]


async def apply_changes(*gateways: BudgetGateway) -> None:
    for gateway in gateways:
        gateway.budget_admission.drop([ChangeEvent(1, "limits", gateway.key.tenant_id, None)])
        await gateway.wait_until_returned()


def reserved(budget_id: int) -> int:
    return budget_period(budget_id).reserved


async def eventually_reserved(budget_id: int, amount: int) -> None:
    async def is_reserved() -> bool:
        return await sync_to_async(reserved)(budget_id) == amount

    await eventually_async(is_reserved)


@pytest.mark.parametrize("order", [1, -1])
def test_the_most_expensive_candidate_is_reserved(key: Any, order: int) -> None:
    """Whichever candidate runs, its cost is at most the reservation."""
    prices = tuple(
        RateCard(
            version,
            None,
            "m",
            Tier.STANDARD,
            0,
            tuple(Rate(1, each, usd if each != Component.OUTPUT else 5 * usd) for each in Component),
        )
        for version, usd in enumerate((3 * 10**9, 30 * 10**9, 3 * 10**8), start=1)
    )
    demand = make_demand(key, prompt=10_000, max_tokens=4096, name=MODEL.name, models=[MODEL], admitted_at=noon(0))
    assert CostEstimate(demand, prices[::order]).amount(4096).money == 10 * RESERVED


# Periods.


def noon(days: int) -> int:
    """Return the time this number of days from now, in the format of requests."""
    at = (datetime.now(UTC) + timedelta(days=days)).replace(hour=12, minute=0, second=0, microsecond=0)
    return int(at.timestamp()) * 1_000_000


def budget_periods(budget_id: int) -> list[BudgetPeriod]:
    found = [row for row in unscoped(BudgetPeriod).all() if row.budget_id == budget_id]
    return sorted(found, key=lambda row: row.period_start)


@pytest.mark.parametrize(("days", "cap", "passed"), [(3, 10, 7), (3, 2, 4), (1, 10, 3), (2, 10, 5)])
async def test_a_period_without_requests_rolls_over_completely(
    gateway: Any, budget: Any, days: int, cap: int, passed: int
) -> None:
    """Two per day, one of them used today; then no requests for some days."""
    made = await sync_to_async(budget)(period="day", amount=2 * RESERVED, rollover_limit=cap * RESERVED)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    found = [await local_gateway.admit(at=noon(days)) for _ in range(passed + 1)]
    assert [isinstance(each, Admitted) for each in found] == [True] * passed + [False]
    assert len(await sync_to_async(budget_periods)(made)) == days + 1
    await see()


async def test_an_unused_budget_rolls_over_from_its_creation(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(period="day", amount=RESERVED, rollover_limit=10 * RESERVED)
    await sync_to_async(change)(made, created_at=datetime.now(UTC) - timedelta(days=2))
    local_gateway = await gateway()
    found = [await local_gateway.admit() for _ in range(4)]
    assert [isinstance(each, Admitted) for each in found] == [True] * 3 + [False]
    await see()


async def test_a_rolled_over_amount_cannot_be_spent_in_its_old_period(gateway: Any, budget: Any) -> None:
    """A request admitted before midnight can reserve after it, when the new day has the rest of the old one."""
    made = await sync_to_async(budget)(period="day", amount=3 * RESERVED, rollover_limit=2 * RESERVED)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    local_gateway.budget_admission.forget()
    found = [await local_gateway.admit(at=noon(1)) for _ in range(6)]
    assert [isinstance(each, Admitted) for each in found] == [True] * 5 + [False]
    local_gateway.budget_admission.forget()
    assert (await local_gateway.admit()).code == "budget_exceeded"
    assert [each.rolled_over for each in await sync_to_async(budget_periods)(made)] == [-2 * RESERVED, 2 * RESERVED]
    await see()


def test_a_new_period_is_opened_concurrently(key: Any, budget: Any, url: str) -> None:
    """Each transaction has a separate connection. The rest of the old period is rolled over once."""
    made = [budget(period="day", amount=2 * RESERVED, rollover_limit=RESERVED, name=f"{n}") for n in range(3)]
    query = "SELECT count(*) FROM billing_open_budget_periods(%s, %s, %s, %s)"

    async def open_all(at: datetime) -> None:
        async def one() -> None:
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as own:
                row = await (await own.execute(query, [key.tenant_id, key.project_id, key.key_id, at])).fetchone()
                assert row == (3,)

        await asyncio.gather(*(one() for _ in range(12)))

    for days in range(3):
        asyncio.run(open_all(datetime.now(UTC) + timedelta(days=days)))
        for each in made:
            found = budget_periods(each)
            assert sum(row.rolled_over for row in found) == 0  # no rest, no rollover
            assert len(found) == days + 1
            assert found[-1].rolled_over == (RESERVED if days else 0)
    check_invariants()


# Concurrent changes.


async def test_a_lowered_budget_applies_to_existing_leases(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 2)
    await sync_to_async(change)(made, amount=3 * RESERVED)
    await apply_changes(local_gateway)
    assert isinstance(await local_gateway.admit(), Admitted)
    assert (await local_gateway.admit()).code == "budget_exceeded"
    await see()


# Concurrent gateways.


@pytest.mark.usefixtures("patient")
async def test_a_large_request_finds_room_among_many_small_ones(gateway: Any, budget: Any) -> None:
    """It needs most of the remaining budget while three others lease as fast as they can."""
    await sync_to_async(budget)(amount=1000 * DOLLAR)
    others = [await gateway(f"gw-{n}") for n in range(3)]
    going = True

    async def keep_on(other: BudgetGateway) -> None:
        while going:
            assert isinstance(await other.admit(max_tokens=10), Admitted)
            await asyncio.sleep(0.002)

    running = [asyncio.create_task(keep_on(other)) for other in others]
    await asyncio.sleep(0.3)
    local_gateway = await gateway("gw-mine")
    found = await local_gateway.admit(max_tokens=int(900 * DOLLAR) // 15_000)
    going = False
    await asyncio.gather(*running)
    assert isinstance(found, Admitted), found
    await see()


@pytest.mark.usefixtures("patient")
async def test_after_a_recall_a_gateway_takes_no_more_than_each_request_needs(gateway: Any, budget: Any) -> None:
    """Otherwise it would lease again what it just returned, before the recalling gateway can."""
    await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    (path,) = local_gateway.budget_admission._chains.values()
    await local_gateway.budget_admission._handle_revocation(set(path.ids))
    await admit_requests(local_gateway, 2)
    newest = sorted(await sync_to_async(unscoped(BudgetLease).all)(), key=lambda each: each.pk)
    assert [(each.money, each.requests) for each in newest[-2:]] == [(RESERVED, 1)] * 2
    path.contended_until = time.monotonic()  # the time is over
    await admit_requests(local_gateway, 1)
    newest = sorted(await sync_to_async(unscoped(BudgetLease).all)(), key=lambda each: each.pk)
    assert newest[-1].requests > 1
    await see()


@pytest.mark.usefixtures("patient")
async def test_a_request_with_reduced_max_tokens_recalls_other_leases(gateway: Any, budget: Any) -> None:
    """Worked example 8 of the specification, while another gateway has leased the budget."""
    await sync_to_async(budget)(amount=50_000_000)
    other, local_gateway = await gateway("gw-other"), await gateway("gw-mine")
    assert isinstance(await other.admit(prompt=10, max_tokens=1), Admitted)
    assert await sync_to_async(lambda: sum(row.money for row in unscoped(BudgetLease).all()))() > 1_000_000
    found = await local_gateway.admit(max_tokens=None)
    assert isinstance(found, Admitted), found
    assert found.max_tokens == (50_000_000 - 45_000 - 30_000_000) // 15_000  # minus the other gateway's admissions
    await see()


def test_exactly_as_many_requests_are_admitted_from_leases_as_fit(key: Any, budget: Any, url: str) -> None:
    """A limit of 200 requests is leased first. Then three processes with 330 requests use all of it."""
    made = budget(amount=200 * RESERVED)
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        meeting = Meeting(3)
        runs = [pool.submit(admit_elsewhere, url, key, f"gw-{n}", 110, meeting) for n in range(3)]
        found = [each for run in runs for each in run.result()]
    events = [each for each in found if isinstance(each, bytes)]
    assert len(events) == 200
    check_invariants()
    settle_events(*events)
    assert reserved(made) == 0
    check_invariants()


# Time.


async def test_a_lease_received_after_its_end_admits_nothing(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens to a gateway that was stopped while it waited for the response."""
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    monkeypatch.setattr(budget_leases, "LEASE_SECONDS", 1.0)  # so its last second starts immediately
    assert (await local_gateway.admit()).code == "server_is_overloaded"
    await eventually_reserved(made, 0)
    await see()


async def test_the_reclaimer_uses_the_clock_of_the_leases(gateway: Any, budget: Any) -> None:
    """The broker's clock, by which settled times are measured, can be hours ahead."""
    made = await sync_to_async(budget)()
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    assert await sync_to_async(reservations.reclaim)(datetime.now(UTC) + timedelta(hours=3)) == 0
    assert await sync_to_async(reserved)(made) >= RESERVED


# Slow and lost responses.


async def test_a_hanging_database_rejects_in_time_and_reserves_nothing(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_admission, "LEASE_ANSWER_SECONDS", 0.2)
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    local_gateway.budget_admission.forget()  # the next request needs a lease
    store = local_gateway.budget_admission._store
    ask = store._ask
    goes_on = asyncio.Event()

    async def hang(query: Any, parameters: Any) -> Any:
        if "billing_lease_budget" in query:
            await goes_on.wait()
        return await ask(query, parameters)

    store._ask = hang  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        refused = await local_gateway.admit()
    assert (refused.status, refused.code) == (503, "server_is_overloaded")
    store._ask = ask  # type: ignore[method-assign]
    monkeypatch.setattr(budget_admission, "LEASE_ANSWER_SECONDS", 10.0)
    assert isinstance(await local_gateway.admit(), Admitted)
    goes_on.set()
    local_gateway.budget_admission.forget()
    await local_gateway.wait_until_returned()
    assert await sync_to_async(reserved)(made) == 2 * RESERVED
    await see()


def another_with_a_cent() -> ApiKeySnapshot:
    """Return a key of another tenant, whose budget has no room for a request."""
    project = only_project(actions.do_create_tenant("other", "Other"))
    made, _ = actions.do_create_api_key(project, "k")
    with all_tenants_scope(BypassReason.COMMAND):
        Budget.objects.create(tenant_id=project.tenant_id, name="b", unit="money", period="month", amount=10**7)
    return key_of(project.tenant_id, project.pk, made.pk)


async def test_a_lease_that_timed_out_rejects_no_request_that_fits(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its response comes too late. Until the lease is returned, requests get 503 with a retry time instead of 429."""
    monkeypatch.setattr(budget_admission, "LEASE_ANSWER_SECONDS", 0.2)
    made = await sync_to_async(budget)(amount=RESERVED)
    local_gateway = await gateway()
    store = local_gateway.budget_admission._store
    ask = store._ask
    may_answer = asyncio.Event()

    async def answer_late(query: Any, parameters: Any) -> Any:
        answer = await ask(query, parameters)
        if "billing_lease_budget" in query:
            store._ask = ask  # type: ignore[method-assign]
            await may_answer.wait()
        return answer

    store._ask = answer_late  # type: ignore[method-assign]
    for _ in range(3):
        refused = await local_gateway.admit()
        assert (refused.status, refused.code) == (503, "server_is_overloaded")
    await eventually_reserved(made, RESERVED)
    with monkeypatch.context() as patch:
        patch.setattr(local_gateway, "key", await sync_to_async(another_with_a_cent)())
        assert (
            await local_gateway.admit()
        ).code == "budget_exceeded"  # the other tenant's lease is not the missing one
    may_answer.set()
    await eventually_reserved(made, 0)
    monkeypatch.setattr(budget_admission, "LEASE_ANSWER_SECONDS", 10.0)
    assert isinstance(await local_gateway.admit(), Admitted)
    assert (await local_gateway.admit()).code == "budget_exceeded"
    await see()


async def test_a_failed_return_of_a_lease_is_repeated_later(gateway: Any, budget: Any) -> None:
    """The database can be unavailable for any time."""
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    store = local_gateway.budget_admission._store
    ask = store._ask

    async def fail(query: Any, parameters: Any) -> Any:
        raise psycopg.OperationalError("away")

    store._ask = fail  # type: ignore[method-assign]
    local_gateway.budget_admission._chains[next(iter(local_gateway.budget_admission._chains))].lease.until = (
        time.monotonic() - 10
    )
    local_gateway.budget_admission.forget()
    await asyncio.sleep(1.2)
    assert await sync_to_async(reserved)(made) > RESERVED
    store._ask = ask  # type: ignore[method-assign]
    await eventually_reserved(made, RESERVED)


async def test_a_gateway_that_ends_during_a_return_keeps_no_lease(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    (first,) = await admit_requests(local_gateway, 1)
    store = local_gateway.budget_admission._store
    ask = store._ask
    begun = asyncio.Event()

    async def slow(query: Any, parameters: Any) -> Any:
        begun.set()
        await asyncio.sleep(0.3)
        return await ask(query, parameters)

    store._ask = slow  # type: ignore[method-assign]
    local_gateway.budget_admission.forget()
    await begun.wait()
    await local_gateway.budget_admission.stop()
    assert await sync_to_async(reserved)(made) == RESERVED
    await sync_to_async(settle_events)(first.event())
    assert await sync_to_async(reserved)(made) == 0


async def test_a_period_dropped_during_a_lease_request_keeps_no_lease(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    store = local_gateway.budget_admission._store
    lease = store.lease

    async def forget_first(*given: Any) -> Any:
        local_gateway.budget_admission._chains.clear()
        return await lease(*given)

    store.lease = forget_first  # type: ignore[method-assign]
    await admit_requests(local_gateway, 1)
    await eventually_reserved(made, RESERVED)


async def test_a_lease_is_returned_once_however_often_the_call_is_repeated(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    (path,) = local_gateway.budget_admission._chains.values()
    leased, store = path.lease, local_gateway.budget_admission._store
    assert leased is not None
    for _ in range(3):
        await store.return_leases([leased])
        assert await sync_to_async(reserved)(made) == RESERVED
    untouched = await store.lease(path, ReservedAmount(RESERVED, 1, 1), ReservedAmount(RESERVED, 1, 1), None)
    assert isinstance(untouched, budget_leases.LocalBudgetLease)
    for _ in range(3):
        await store.return_leases([untouched])
        assert await sync_to_async(reserved)(made) == RESERVED
    # Nor after the reclaimer reclaimed it and raised the fencing token.
    again = await store.lease(path, ReservedAmount(RESERVED, 1, 1), ReservedAmount(RESERVED, 1, 1), None)
    assert isinstance(again, budget_leases.LocalBudgetLease)
    await sync_to_async(reclaim_all)()
    await store.return_leases([again])
    assert await sync_to_async(reserved)(made) == 0
    await see()


async def test_a_resumed_gateway_changes_nothing_by_reclaimed_leases(gateway: Any, budget: Any) -> None:
    """It admitted before the stop, and its lease was reclaimed. Then it dispatches and settles after all."""
    made = await sync_to_async(budget)(amount=3 * RESERVED)
    stopped, local_gateway = await gateway("gw-stopped"), await gateway("gw-mine")
    before = await admit_requests(stopped, 3)
    await drop_revocations(stopped)
    await sync_to_async(reclaim_all)()
    after = await admit_requests(local_gateway, 3)
    await sync_to_async(settle_events)(*(each.event() for each in before))
    assert isinstance(await stopped.admit(), ApiError)
    now = await sync_to_async(budget_period)(made)
    assert (now.used, now.reserved) == (0, 3 * RESERVED)
    await sync_to_async(settle_events)(*(each.event() for each in after))
    await see()
