"""Sums of closed leases: they count in budgets, corrections and the reconciler as the rows of the leases did."""

from __future__ import annotations

import random
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from billing.metering.reconciler import LOOKBACK, reconcile
from billing.models import Budget, BudgetCorrection, BudgetLease, BudgetLeaseSum, BudgetPeriod, Reconciliation
from billing.reservations import lease_sums, reservations
from billing.reservations.lease_sums import FOLD_AFTER, fold_leases
from billing.reservations.reservations import LeaseKey, ReservationUse
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tests.support.rows import unscoped
from tests.support.waiting import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
NOW = datetime.now(UTC)
OLD = NOW - FOLD_AFTER - timedelta(days=1)
LIMIT = 1000  # of each hard budget, in its unit


def make_periods(slug: str) -> tuple[int, list[int]]:
    """Create a tenant with a budget period for each unit. Return their IDs."""
    tenant = actions.do_create_tenant(slug, slug)
    with all_tenants_scope(BypassReason.COMMAND):
        periods = []
        for unit in ("money", "tokens", "requests"):
            budget = Budget.objects.create(tenant=tenant, name=unit, unit=unit, period="month", amount=LIMIT)
            period = BudgetPeriod.objects.create(
                tenant_id=tenant.pk,
                budget_id=budget.pk,
                unit=unit,
                period_start=OLD - timedelta(days=1),
                period_end=NOW + timedelta(days=1),
            )
            periods.append(period.pk)
    return tenant.pk, periods


def make_lease(tenant_id: int, period_ids: list[int], created_at: datetime = OLD, **fields: Any) -> int:
    """Create a closed lease without usage. Return its ID."""
    given: dict[str, Any] = {"tenant_id": tenant_id, "gateway_id": "gw", "budget_period_ids": period_ids}
    given |= {"money": 0, "tokens": 0, "requests": 0, "fully_reserved": True, "open": False}
    given |= {"created_at": created_at, "leased_until": created_at, "reclaim_at": created_at}
    with all_tenants_scope(BypassReason.COMMAND):
        lease: BudgetLease = BudgetLease.objects.create(**(given | fields))
        return lease.pk


def adjust(tenant_id: int, lease_id: int, use: ReservationUse, *, token: int = 1, must_fit: bool = False) -> bool:
    with all_tenants_scope(BypassReason.SETTLER), connection.cursor() as cursor:
        return reservations.adjust(cursor, LeaseKey(lease_id, token, tenant_id), use, must_fit=must_fit)


def used(period_ids: list[int]) -> list[int]:
    rows = {row.pk: int(row.used) for row in unscoped(BudgetPeriod).all()}
    return [rows[pk] for pk in period_ids]


def run(statement: str, *values: object) -> None:
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(statement, values)


@pytest.mark.parametrize("seed", range(6))
def test_sums_count_as_the_rows_of_their_leases_did(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tenants have equal histories. The leases of one are folded at random times, those of the other never."""
    monkeypatch.setattr(lease_sums, "BATCH_SIZE", 3)
    chance = random.Random(seed)
    folding, keeping = make_periods("folding"), make_periods("keeping")
    times = [OLD - timedelta(hours=chance.randrange(48)) for _ in range(8)]
    chains = [chance.sample(range(3), chance.randrange(1, 4)) for _ in times]
    leases: list[tuple[int, list[int]]] = []  # tenant and leases
    for (tenant_id, periods), is_open in ((folding, False), (keeping, True)):
        rows = zip(times, chains, strict=True)
        ids = [make_lease(tenant_id, [periods[unit] for unit in units], at, open=is_open) for at, units in rows]
        leases.append((tenant_id, ids))
    applied: list[tuple[int, ReservationUse]] = []
    for _ in range(60):
        if chance.random() < 0.2:
            fold_leases(NOW if chance.random() < 0.5 else NOW - timedelta(days=1))
        if applied and chance.random() < 0.2:
            index, use = applied.pop(chance.randrange(len(applied)))
            results = [adjust(tenant_id, ids[index], -use) for tenant_id, ids in leases]
        else:
            index, must_fit = chance.randrange(8), chance.random() < 0.6
            use = ReservationUse(chance.randrange(10**8), chance.randrange(60), 1)
            results = [adjust(tenant_id, ids[index], use, must_fit=must_fit) for tenant_id, ids in leases]
            applied += [(index, use)] if results[0] else []
        assert results[0] == results[1]
        assert used(folding[1]) == used(keeping[1])
    fold_leases(NOW)
    assert sorted(row.pk for row in unscoped(BudgetLease).all()) == sorted(leases[1][1])
    assert sorted(pk for row in unscoped(BudgetLeaseSum).all() for pk in row.lease_ids) == sorted(leases[0][1])
    run("UPDATE billing_budgetlease SET open = false")
    assert not reconcile().differences
    assert fold_leases(NOW) == 8
    run("DELETE FROM billing_reconciliation")
    assert not reconcile().differences


def test_open_and_new_leases_are_not_folded() -> None:
    tenant_id, periods = make_periods("acme")
    kept = {
        make_lease(tenant_id, periods, open=True, requests=1),
        make_lease(tenant_id, periods, NOW - FOLD_AFTER + timedelta(minutes=1)),
    }
    make_lease(tenant_id, periods)
    assert FOLD_AFTER > LOOKBACK
    assert fold_leases(NOW) == 1
    assert {row.pk for row in unscoped(BudgetLease).all()} == kept


def test_leases_of_the_same_day_have_one_sum() -> None:
    tenant_id, periods = make_periods("acme")
    noon = OLD.replace(hour=12)
    first = [
        make_lease(tenant_id, periods, noon + timedelta(minutes=minute), fencing_token=7 + minute)
        for minute in range(2)
    ]
    assert fold_leases(NOW) == 2
    later = make_lease(tenant_id, periods, noon + timedelta(minutes=5))
    assert (fold_leases(NOW), fold_leases(NOW)) == (1, 0)
    (row,) = unscoped(BudgetLeaseSum).all()
    assert (row.tenant_id, row.budget_period_ids, row.day) == (tenant_id, periods, noon.date())
    assert (row.lease_ids, row.fencing_tokens) == ([*first, later], [7, 8, 1])


def test_usage_is_added_only_to_the_sum_of_its_own_lease() -> None:
    """A failover of PostgreSQL can assign the ID of a lease a second time. A reclaim increases the token by one."""
    tenant_id, periods = make_periods("acme")
    other_tenant_id, _ = make_periods("other")
    make_lease(tenant_id, periods, fencing_token=3)
    lease_id = make_lease(tenant_id, periods, fencing_token=8)
    assert fold_leases(NOW) == 2
    for token in (3, 6, 9):
        assert adjust(tenant_id, lease_id, ReservationUse(5, 5, 1), token=token)
    assert adjust(other_tenant_id, lease_id, ReservationUse(5, 5, 1), token=8)
    assert used(periods) == [0, 0, 0]
    for token in (7, 8):
        assert adjust(tenant_id, lease_id, ReservationUse(5, 1, 1), token=token)
    assert used(periods) == [10, 2 * 10**6, 2 * 10**6]
    assert not reconcile().differences


def test_usage_of_a_lease_that_never_existed_changes_nothing() -> None:
    tenant_id, periods = make_periods("acme")
    assert adjust(tenant_id, 10**12, ReservationUse(5, 5, 1))
    assert used(periods) == [0, 0, 0]


def test_a_correction_at_the_time_of_folding_is_counted_once() -> None:
    tenant_id, periods = make_periods("acme")
    leases = [make_lease(tenant_id, periods) for _ in range(20)]

    def correct() -> None:
        for lease_id in leases:
            adjust(tenant_id, lease_id, ReservationUse(10**6, 1, 1))
        connection.close()

    def fold() -> None:
        for _ in range(10):
            fold_leases(NOW)
        connection.close()

    threads = [threading.Thread(target=target) for target in (correct, correct, fold, fold)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fold_leases(NOW)
    assert used(periods) == [40 * 10**6] * 3
    assert not unscoped(BudgetLease).all()
    assert sum(int(row.settled_requests) for row in unscoped(BudgetLeaseSum).all()) == 40
    assert not reconcile().differences


def test_a_sum_that_is_locked_is_left_for_the_next_run() -> None:
    tenant_id, periods = make_periods("acme")
    make_lease(tenant_id, periods)
    fold_leases(NOW)
    waiting = make_lease(tenant_id, periods)
    found: list[int] = []

    def fold() -> None:
        found.append(fold_leases(NOW))
        connection.close()

    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM billing_budgetleasesum FOR NO KEY UPDATE")
        thread = threading.Thread(target=fold)
        thread.start()
        thread.join()
    assert found == [0]
    assert [row.pk for row in unscoped(BudgetLease).all()] == [waiting]
    assert fold_leases(NOW) == 1


def test_a_tenant_reads_only_its_own_sums() -> None:
    for slug in ("one", "two"):
        tenant_id, periods = make_periods(slug)
        make_lease(tenant_id, periods)
    fold_leases(NOW)
    with tenant_scope(tenant_id), connection.cursor() as cursor:
        cursor.execute("SELECT tenant_id FROM billing_budgetleasesum")
        assert cursor.fetchall() == [(tenant_id,)]
        cursor.execute("SELECT has_table_privilege('billing_budgetleasesum', 'UPDATE')")
        assert cursor.fetchone() == (False,)


def test_the_reconciler_corrects_a_budget_period_by_its_sums() -> None:
    tenant_id, periods = make_periods("acme")
    lease_id = make_lease(tenant_id, periods)
    adjust(tenant_id, lease_id, ReservationUse(7 * 10**6, 3, 1))
    fold_leases(NOW)
    assert not reconcile().differences
    run("UPDATE billing_budgetperiod SET used = used + 5 WHERE unit = 'tokens'")
    report = reconcile()
    assert (report.corrected, report.is_full) == (1, False)
    assert used(periods) == [7 * 10**6, 3 * 10**6, 10**6]
    (correction,) = unscoped(BudgetCorrection).all()
    assert (correction.used, correction.reserved) == (-5, 0)


def test_the_reconciler_compares_what_has_changed_and_once_a_day_everything() -> None:
    tenant_id, periods = make_periods("acme")
    closed = make_lease(tenant_id, [periods[1]], NOW - timedelta(hours=20))
    first = reconcile()
    assert (first.is_full, first.budget_periods, first.is_clean) == (True, 3, True)
    # An autovacuum may have begun before the last run. Until it ends, the rows since its begin count as changed.
    assert eventually(lambda: reconcile().budget_periods == 0)
    run("UPDATE billing_budgetlease SET settled_tokens = 3 WHERE id = %s", closed)
    unseen = reconcile()
    assert (unseen.is_full, unseen.is_clean) == (False, True)
    run("UPDATE billing_reconciliation SET created_at = created_at - interval '25 hours'")
    found = reconcile()
    assert found.is_full
    assert [each["lease"] for each in found.differences if "lease" in each] == [closed]
    again = reconcile()  # reported until it agrees
    assert not again.is_full
    assert [each["lease"] for each in again.differences if "lease" in each] == [closed]
    run("UPDATE billing_budgetlease SET settled_tokens = 0 WHERE id = %s", closed)
    run("UPDATE billing_budgetperiod SET used = 0")
    assert reconcile().is_clean


def test_a_transaction_that_was_open_at_the_last_run_is_compared_by_the_next() -> None:
    _, periods = make_periods("acme")
    reconcile()
    changed, proceed = threading.Event(), threading.Event()

    def change() -> None:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            cursor.execute("UPDATE billing_budgetperiod SET used = 9 WHERE id = %s", [periods[0]])
            changed.set()
            proceed.wait(60)
        connection.close()

    thread = threading.Thread(target=change)
    thread.start()
    assert changed.wait(60)
    try:
        assert not reconcile().differences
    finally:
        proceed.set()
        thread.join()
    report = reconcile()
    assert (report.is_full, report.corrected) == (False, 1)
    assert used(periods) == [0, 0, 0]


def test_after_a_failover_with_lower_transaction_numbers_everything_is_compared() -> None:
    make_periods("acme")
    reconcile()
    with all_tenants_scope(BypassReason.COMMAND):
        Reconciliation.objects.update(horizon=2**60)
    assert reconcile().is_full
