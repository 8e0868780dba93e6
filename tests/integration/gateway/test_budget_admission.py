"""Budgets with several gateways: never exceeded, and every request that fits is admitted.

The numbers are those of the specification.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection

from billing.metering.reconciler import reconcile
from billing.models import Adjustment, Budget, BudgetCorrection, BudgetPeriod, PriceBook, PriceBookAssignment
from billing.reservations import budget_leases, reservations
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.core.errors import ApiError
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.models import Tenant
from tests.support.gateway.budget_gateways import MODEL, Admitted, Meeting, admit_elsewhere
from tests.support.gateway.budgets import (
    COST,
    DOLLAR,
    RESERVED,
    admit_requests,
    budget_period,
    check_invariants,
    database_url,
    drop_revocations,
    reclaim_all,
    see,
    settle_events,
)
from tests.support.gateway.keys import make_demand
from tests.support.invariants import assert_ledger_invariants
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
ROUNDS = [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


async def test_worked_example_6_the_unused_part_is_released(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)()
    local_gateway = await gateway()
    admitted = await local_gateway.admit()
    assert admitted.reserved_nano == RESERVED
    held = (await sync_to_async(budget_period)(made)).reserved
    assert held >= RESERVED
    await see()
    await sync_to_async(settle_events)(admitted.event())
    after = await sync_to_async(budget_period)(made)
    assert (after.used, held - after.reserved) == (COST * 10**6, RESERVED)
    await see()


async def test_the_billing_context_names_the_reservation_even_if_it_was_read_before(gateway: Any, budget: Any) -> None:
    await sync_to_async(budget)()
    local_gateway = await gateway()
    demand = make_demand(local_gateway.key, models=[MODEL], admitted_at=time.time_ns() // 1000)
    read_before = AdmittedRequest(demand, 4096)
    assert read_before.billing_context.reserved_nano is None
    budget_admission = local_gateway.budget_admission
    admitted = await budget_admission.take(budget_admission.estimate(demand), read_before)
    assert admitted.billing_context.reserved_nano == admitted.reserved_nano is not None


@pytest.mark.parametrize("rounds", ROUNDS)
def test_worked_example_7_exactly_ten_of_a_hundred_pass(
    key: ApiKeySnapshot, budget: Any, url: str, rounds: int
) -> None:
    """Three gateway processes receive a hundred concurrent requests, several times, each with a separate budget."""
    spawn = multiprocessing.get_context("spawn")
    counts = {"a": 34, "b": 33, "c": 33}
    with ProcessPoolExecutor(3, mp_context=spawn) as pool:
        for number in range(rounds):
            made = budget()
            meeting = Meeting(len(counts))
            named = {f"{name}{number}": count for name, count in counts.items()}
            runs = [pool.submit(admit_elsewhere, url, key, name, count, meeting) for name, count in named.items()]
            found = [each for run in runs for each in run.result()]
            events = [each for each in found if isinstance(each, bytes)]
            assert len(events) == 10
            assert {each for each in found if isinstance(each, str)} == {"budget_exceeded"}
            check_invariants()
            settle_events(*events)
            reclaim_all()  # the unused leases of the dead gateways
            after = budget_period(made)
            assert (after.used, after.reserved) == (132_000_000 * 10**6, 0)
            check_invariants()
            with all_tenants_scope(BypassReason.COMMAND):
                Budget.objects.all_tenants().update(active=False)


@pytest.mark.usefixtures("patient")
async def test_unused_leases_of_other_gateways_are_recalled(gateway: Any, budget: Any) -> None:
    """Four gateways hold leases, and a request needs most of the remaining budget."""
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    others = [await gateway(f"gw-{n}") for n in range(4)]
    admitted = [await other.admit() for other in others]
    assert (
        await sync_to_async(budget_period)(made)
    ).reserved > 4 * 50 * RESERVED  # they lease far more than they have admitted
    local_gateway = await gateway("gw-mine")
    left = 100 * DOLLAR - 4 * RESERVED
    huge = (left - 30_000_000) // 15_000  # output tokens
    found = await local_gateway.admit(max_tokens=huge)
    assert isinstance(found, Admitted), found
    await see()
    refused = await local_gateway.admit(max_tokens=1000)
    assert isinstance(refused, ApiError)
    assert refused.code == "budget_exceeded"  # all of it is reserved by requests
    assert (b"x-should-retry", b"false") in refused.headers()
    await sync_to_async(settle_events)(found.event(), *(each.event() for each in admitted))
    assert isinstance(await local_gateway.admit(), Admitted)
    await see()


async def test_a_stopped_gateway_keeps_its_lease_until_it_is_reclaimed(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_leases, "LEASE_SECONDS", 4.0)
    monkeypatch.setattr(budget_leases, "SETTLING_SECONDS", 0.0)
    await sync_to_async(budget)(amount=10 * DOLLAR)
    dead, local_gateway = await gateway("gw-dead"), await gateway("gw-mine")
    await admit_requests(dead, 1)
    await drop_revocations(dead)
    refused = await local_gateway.admit(max_tokens=(10 * DOLLAR - RESERVED - 30_000_000) // 15_000)
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code) == (503, "server_is_overloaded")
    assert 1 <= refused.retry_after <= 6
    assert isinstance(await local_gateway.admit_with_retries(), Admitted)  # a request that fits beside it is admitted
    never = await local_gateway.admit_with_retries(max_tokens=10 * DOLLAR // 15_000)
    assert never.code == "budget_exceeded"  # it would not fit even after that
    await asyncio.sleep(refused.retry_after + 0.2)
    await sync_to_async(reservations.reclaim)(datetime.now(UTC))
    found = await local_gateway.admit_with_retries(max_tokens=(10 * DOLLAR - 3 * RESERVED) // 15_000)
    assert isinstance(found, Admitted), found
    await see()


def _bill_in(currency: str) -> None:
    """Assign the tenant to a price book in a currency. The rate cards of the list still apply to it."""
    with all_tenants_scope(BypassReason.COMMAND):
        book = PriceBook.objects.create(name="other", currency=currency)
        PriceBookAssignment.objects.create(tenant=Tenant.objects.all_tenants().get(), book=book)


async def test_a_rejection_names_amounts_in_the_tenants_currency(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sync_to_async(_bill_in)("JPY")
    await sync_to_async(budget)(amount=50_000_000)
    await sync_to_async(budget)(amount=1, unit="requests", name="few")
    local_gateway = await gateway()
    refused = await local_gateway.admit(max_tokens=4096)
    assert "JPY 0.05 left, up to JPY 0.09144 needed" in str(refused)
    store, queries = local_gateway.budget_admission._store, []
    run = store._ask
    monkeypatch.setattr(store, "_ask", lambda query, values: queries.append(query) or run(query, values))
    assert "JPY 0.05 left" in str(await local_gateway.admit(max_tokens=4096))
    assert queries
    assert not any("pricebook" in query for query in queries)


async def test_a_stopped_gateway_admits_nothing_from_an_expired_lease(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_leases, "LEASE_SECONDS", 4.0)
    await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    (first,) = await admit_requests(local_gateway, 1)
    await drop_revocations(local_gateway)
    await asyncio.sleep(3.1)  # the lease is not used in its last second
    (second,) = await admit_requests(local_gateway, 1)
    assert second.lease_id != first.lease_id
    await see()


async def test_worked_example_8_max_tokens_is_reduced_if_the_budget_allows_it(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=50_000_000)
    local_gateway = await gateway()
    refused = await local_gateway.admit(max_tokens=4096)
    assert refused.code == "budget_exceeded"
    assert "$0.05 left" in str(refused)
    assert "resets at" in str(refused)
    assert (
        await local_gateway.admit(prompt=16_667, max_tokens=None)
    ).code == "budget_exceeded"  # not even the prompt fits
    with_less = await local_gateway.admit(max_tokens=None)  # a request without max_tokens gets what is affordable
    assert with_less.max_tokens == 1333
    await sync_to_async(settle_events)(with_less.event("failed", uncached=0))

    def reduce_max_tokens() -> None:
        with all_tenants_scope(BypassReason.COMMAND):
            Budget.objects.all_tenants().filter(pk=made).update(reduce_max_tokens=True)

    await sync_to_async(reduce_max_tokens)()
    local_gateway.budget_admission.forget()
    assert (await local_gateway.admit(max_tokens=4096)).max_tokens == 1333
    await see()


async def test_worked_example_9_the_gateway_dies_before_dispatch(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=RESERVED)
    local_gateway = await gateway()
    (lost,) = await admit_requests(local_gateway, 1)
    assert (await sync_to_async(budget_period)(made)).reserved == RESERVED
    assert await sync_to_async(reservations.reclaim)(datetime.now(UTC)) == 0  # its lease is active
    assert await sync_to_async(reclaim_all)() == 1
    assert (await sync_to_async(budget_period)(made)).reserved == 0
    await see()
    (next_,) = await admit_requests(local_gateway, 1)
    late = lost.event()
    for _ in range(2):  # it ran after all, and its event comes twice: there is no room, so it is not billed
        await sync_to_async(settle_events)(late)
        after = await sync_to_async(budget_period)(made)
        assert (after.used, after.reserved) == (0, RESERVED)
        (adjustment,) = await sync_to_async(unscoped(Adjustment).all)()
        assert (adjustment.outcome, adjustment.cost_femto) == ("late", -COST * 10**6)
    await sync_to_async(settle_events)(next_.event(), next_.event())
    after = await sync_to_async(budget_period)(made)
    assert (after.used, after.reserved) == (COST * 10**6, 0)
    await see()


async def test_late_usage_that_still_fits_is_billed(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)()
    local_gateway = await gateway()
    (admitted,) = await admit_requests(local_gateway, 1)
    await sync_to_async(reclaim_all)()
    for _ in range(2):
        await sync_to_async(settle_events)(admitted.event())
        after = await sync_to_async(budget_period)(made)
        assert (after.used, after.reserved) == (COST * 10**6, 0)
    await see()


@pytest.mark.parametrize("order", [("completed", "failed"), ("failed", "completed"), ("completed", "failed", "failed")])
async def test_a_request_reported_as_failed_costs_nothing(gateway: Any, budget: Any, order: tuple[str]) -> None:
    made = await sync_to_async(budget)()
    quota = await sync_to_async(budget)(name="quota", unit="tokens", amount=10**6)
    local_gateway = await gateway()
    (admitted,) = await admit_requests(local_gateway, 1)
    for outcome in order:
        result = await sync_to_async(settle_events)(
            admitted.event(outcome) if outcome != "failed" else admitted.event(outcome, uncached=700)
        )
        assert result.quarantined == 0
    after = await sync_to_async(budget_period)(made)
    assert after.used == 0
    assert (await sync_to_async(budget_period)(quota)).used == 0
    await see()


async def test_a_reservation_takes_all_budget_periods_or_none(gateway: Any, budget: Any, key: ApiKeySnapshot) -> None:
    wide = await sync_to_async(budget)(name="wide")
    narrow = await sync_to_async(budget)(name="narrow", unit="tokens", period="day", amount=14_000, key_id=key.key_id)
    calls = await sync_to_async(budget)(
        name="calls", unit="requests", period="lifetime", amount=3, project_id=key.project_id
    )
    local_gateway = await gateway()
    refused = await local_gateway.admit()
    assert (refused.code, refused.type) == ("quota_exceeded", "insufficient_quota")
    assert "'narrow'" in str(refused)
    assert "14000 tokens left" in str(refused)
    held = [(await sync_to_async(budget_period)(each)).reserved for each in (wide, narrow, calls)]
    assert held == [0, 0, 0]
    admitted = await local_gateway.admit(max_tokens=3000)
    held = [(await sync_to_async(budget_period)(each)).reserved for each in (wide, narrow, calls)]
    assert held == [75_000_000, 13_000, 1]
    await sync_to_async(settle_events)(admitted.event())
    used = [(await sync_to_async(budget_period)(each)).used for each in (wide, narrow, calls)]
    assert used == [COST * 10**6, 10_500 * 10**6, 10**6]
    await see()


async def test_soft_and_dry_run_budgets_reject_nothing(gateway: Any, budget: Any) -> None:
    soft = await sync_to_async(budget)(name="soft", mode="soft", amount=1)
    dry = await sync_to_async(budget)(name="dry", mode="dry_run", amount=2 * RESERVED)
    calls = await sync_to_async(budget)(name="calls", unit="requests", mode="dry_run", amount=4)
    local_gateway = await gateway()
    admitted = await admit_requests(local_gateway, 5)
    assert (await sync_to_async(budget_period)(dry)).rejected == 3
    assert (await sync_to_async(budget_period)(calls)).rejected == 1
    await sync_to_async(settle_events)(*(each.event() for each in admitted))
    for each in (soft, dry):
        after = await sync_to_async(budget_period)(each)
        assert (after.used, after.reserved) == (5 * COST * 10**6, 0)
    await see()


async def test_a_new_period_is_a_new_row_with_the_rolled_over_amount(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(period="day", amount=2 * RESERVED, rollover_limit=RESERVED)
    local_gateway = await gateway()
    (today,) = await admit_requests(local_gateway, 1)
    midnight = (datetime.now(UTC) + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    tomorrow = int(midnight.timestamp()) * 1_000_000
    passed = [await local_gateway.admit(at=tomorrow + number) for number in range(4)]
    assert [isinstance(each, Admitted) for each in passed] == [True] * 3 + [False]  # two, and one rolled over
    first, second = sorted(
        (each for each in await sync_to_async(unscoped(BudgetPeriod).all)() if each.budget_id == made),
        key=lambda each: each.period_start,
    )
    assert (first.reserved, second.reserved, second.rolled_over) == (RESERVED, 3 * RESERVED, RESERVED)
    assert first.period_end == second.period_start == midnight
    await sync_to_async(settle_events)(today.event())
    await see()


async def test_a_model_without_a_price_is_rejected(gateway: Any, key: ApiKeySnapshot) -> None:
    local_gateway = await gateway()
    local_gateway.budget_admission.prices = type(local_gateway.budget_admission.prices)()
    refused = await local_gateway.admit()
    assert (refused.status, refused.code) == (503, "model_not_priced")
    assert (b"x-should-retry", b"false") in refused.headers()


async def test_until_the_prices_are_loaded_a_request_may_be_retried(gateway: Any, key: ApiKeySnapshot) -> None:
    local_gateway = await gateway()
    admission = local_gateway.budget_admission
    admission.prices, admission.has_prices = type(admission.prices)(), False
    refused = await local_gateway.admit()
    assert (refused.status, refused.code) == (503, "server_is_overloaded")
    assert (b"x-should-retry", b"false") not in refused.headers()


async def test_a_new_budget_applies_from_the_next_change_on(gateway: Any, budget: Any, key: ApiKeySnapshot) -> None:
    local_gateway = await gateway()
    (before,) = await admit_requests(local_gateway, 1)
    assert before.lease_id is None
    made = await sync_to_async(budget)(amount=RESERVED)
    local_gateway.budget_admission.forget()
    await admit_requests(local_gateway, 1)
    assert (await local_gateway.admit()).code == "budget_exceeded"
    await sync_to_async(settle_events)(before.event())
    assert (await sync_to_async(budget_period)(made)).used == 0
    await see()


async def test_a_disconnect_while_a_lease_is_requested_leaves_no_reservation(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=2 * RESERVED)
    local_gateway = await gateway()
    await admit_requests(local_gateway, 1)
    leaving = asyncio.create_task(local_gateway.admit())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    await local_gateway.wait_until_returned()
    assert (await sync_to_async(budget_period)(made)).reserved == RESERVED
    await admit_requests(local_gateway, 1)
    await see()


async def test_the_reconciler_corrects_and_reports_manual_changes(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)()
    local_gateway = await gateway()
    one, _ = await admit_requests(local_gateway, 2)
    await sync_to_async(settle_events)(one.event())
    report = await sync_to_async(reconcile)()
    assert report.is_clean
    assert report.budget_periods == 1

    def meddle() -> None:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            cursor.execute("UPDATE billing_budgetperiod SET reserved = reserved + 5, used = used - 7")

    before = await sync_to_async(budget_period)(made)
    await sync_to_async(meddle)()
    with pytest.raises(AssertionError, match="invariant 2"):
        await sync_to_async(assert_ledger_invariants)(database_url())
    report = await sync_to_async(reconcile)()
    assert (report.corrected, report.differences[0]["reserved"], report.differences[0]["used"]) == (1, -5, "7")
    after = await sync_to_async(budget_period)(made)
    assert (after.reserved, after.used) == (before.reserved, before.used)
    (correction,) = await sync_to_async(unscoped(BudgetCorrection).all)()
    assert (correction.reserved, correction.used) == (-5, 7)
    assert (await sync_to_async(reconcile)()).is_clean

    def meddle_with_leases(tokens: int, requests: int) -> None:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            cursor.execute(
                """UPDATE billing_budgetlease SET settled_tokens = settled_tokens + %s,
                settled_requests = settled_requests + %s WHERE id = %s""",
                [tokens, requests, one.lease_id],
            )

    await sync_to_async(meddle_with_leases)(3, 1)
    (found,) = (await sync_to_async(reconcile)()).differences
    assert (found["lease"], found["used"], found["tokens"], found["requests"]) == (one.lease_id, "0", -3, -1)
    await sync_to_async(meddle_with_leases)(-3, -1)
    assert (await sync_to_async(reconcile)()).is_clean
    await see()
