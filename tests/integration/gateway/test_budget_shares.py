"""The share of its budgets that a key has left, as conditions of routing policies read it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from psycopg_pool import AsyncConnectionPool

from billing.models import Budget
from millrace.gateway.admission import budget_shares
from millrace.gateway.admission.budget_shares import BudgetShares
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tests.support.gateway.budgets import DOLLAR, budget_period

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]


def use(budget_id: int, percent: int, reserved_percent: int = 0) -> None:
    """Set what is used and reserved of a budget of $100."""
    row = budget_period(budget_id)
    row.used, row.reserved = percent * DOLLAR * 10**6, reserved_percent * DOLLAR
    with all_tenants_scope(BypassReason.COMMAND):
        row.save()


def double(budget_id: int) -> None:
    """Increase a budget of $100 for a time."""
    with all_tenants_scope(BypassReason.COMMAND):
        Budget.objects.all_tenants().filter(pk=budget_id).update(
            temporary_increase=100 * DOLLAR, increase_expires_at=datetime(2100, 1, 1, tzinfo=UTC)
        )


async def test_the_smallest_share_of_enforced_budgets_counts(
    database_pool: AsyncConnectionPool, close_connection: None, budget: Any, key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_shares, "CACHE_SECONDS", 0.0)
    shares = BudgetShares(database_pool)
    assert await shares.percent_left(key) is None
    month, day, watched = [
        await sync_to_async(budget)(amount=100 * DOLLAR, name=name, **fields)
        for name, fields in (("month", {}), ("day", {"period": "day"}), ("watched", {"mode": "dry_run"}))
    ]
    assert await shares.percent_left(key) == 100  # opens the periods
    await sync_to_async(use)(month, 20, 20)
    await sync_to_async(use)(day, 30)
    await sync_to_async(use)(watched, 99)
    assert await shares.percent_left(key) == 60
    await sync_to_async(double)(month)
    assert await shares.percent_left(key) == 70
    await sync_to_async(use)(day, 150)
    assert await shares.percent_left(key) == 0
    await database_pool.close()
    assert await shares.percent_left(key) == 0  # the last known share
