"""Requests of prepaid tenants at their own prices: exactly as many are admitted as the credit pays."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from billing.invoicing.price_terms import do_add_price_term
from billing.invoicing.setup import do_set_prepaid
from billing.ledger.booking import booking
from billing.ledger.credits import do_grant_credit
from billing.models import Budget, BudgetPeriod, CreditGrant
from billing.rates.pricing import Component
from billing.rates.terms import TermRule, TermType, VolumeTier
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.models import Tenant
from tests.support.gateway.budget_gateways import MODEL, Meeting, admit_elsewhere
from tests.support.gateway.budgets import COST, DOLLAR, RESERVED, check_invariants, reclaim_all, settle_events
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
HALF = TermRule(TermType.DISCOUNT, ppm=500_000)
# All output tokens cost $30, so that a reservation is at most twice the one by the list.
TIER = TermRule(TermType.GRADUATED, MODEL.name, component=Component.OUTPUT, tiers=(VolumeTier(0, 30 * DOLLAR),))


@pytest.mark.parametrize(
    ("rule", "reserved", "cost"),
    [
        (None, RESERVED, COST),
        (HALF, RESERVED // 2, COST // 2),
        (TIER, 2 * RESERVED, COST + 500 * 15_000),  # 500 tokens of output
    ],
)
def test_concurrent_requests_are_admitted_for_exactly_the_credit(
    key: ApiKeySnapshot, url: str, rule: TermRule | None, reserved: int, cost: int
) -> None:
    """Three gateway processes receive 40 concurrent requests of a tenant whose credit pays ten, in two rounds."""
    tenant = unscoped(Tenant).get(pk=key.tenant_id)
    if rule is not None:
        do_add_price_term(tenant, rule, description="Agreed", first_month=f"{datetime.now(UTC):%Y-%m}")
    do_set_prepaid(tenant, is_prepaid=True)
    credit = 10 * reserved + reserved - 2
    do_grant_credit(tenant, CreditGrant.GrantType.PROMOTIONAL, credit)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=spawn) as pool:
        for number in range(2):
            expected = credit // reserved
            events = admit_concurrently(pool, url, key, number)
            assert len(events) == expected
            check_invariants()
            settle_events(*events)
            reclaim_all()  # the unused leases of the dead gateways
            check_invariants()
            credit -= expected * cost
            with booking(tenant.pk):  # as the schedule does while the price is not the same for all usage
                pass
            (gate,) = unscoped(Budget).filter(is_balance=True)
            assert gate.amount * 10**6 - used_of(gate) == credit * 10**6 * RESERVED // reserved


def admit_concurrently(pool: ProcessPoolExecutor, url: str, key: ApiKeySnapshot, number: int) -> list[bytes]:
    """Return the usage events of the admitted requests. The others are rejected for the budget."""
    meeting = Meeting(3)
    counts = {f"{name}{number}": count for name, count in (("a", 14), ("b", 13), ("c", 13))}
    runs = [pool.submit(admit_elsewhere, url, key, name, count, meeting) for name, count in counts.items()]
    found: list[Any] = [each for run in runs for each in run.result()]
    assert {each for each in found if isinstance(each, str)} == {"budget_exceeded"}
    return [each for each in found if isinstance(each, bytes)]


def used_of(gate: Budget) -> int:
    with all_tenants_scope(BypassReason.COMMAND):
        return sum(int(row.used) for row in BudgetPeriod.objects.for_tenant(gate.tenant_id).filter(budget_id=gate.pk))
