"""The budgets of a request: those it reserved from, and the one that rejected it.

The scope of the tenant must be open (`tenants.isolation.scopes.tenant_scope`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from billing.models import Budget, BudgetPeriod
from millrace.apps.request_log.models import RequestRecord


@dataclass(frozen=True)
class HeldFrom:
    """A budget that the request had to fit, with the budget period it was reserved from.

    `limit` is the present limit of that period: `amount`, what rolled over, and an active temporary increase.
    """

    budget_id: int
    name: str
    unit: str
    period: str
    scope: str
    mode: str
    amount: int
    limit: int
    temporary_increase: int  # included in `limit`; 0 if none is active
    increase_expires_at: datetime | None


def budgets_of(tenant_id: int, windows: Iterable[int]) -> tuple[HeldFrom, ...]:
    """Return the budgets that have these budget periods."""
    periods = {
        row.budget_id: row
        for row in BudgetPeriod.objects.for_tenant(tenant_id).filter(pk__in=list(windows)).order_by("period_start")
    }
    rows = Budget.objects.for_tenant(tenant_id).filter(pk__in=periods).order_by("pk")
    return tuple(_held_from(row, periods[row.pk]) for row in rows)


def rejecting_budget(tenant_id: int, record: RequestRecord | None) -> HeldFrom | None:
    """Return the budget that rejected the request; None if none did, or if it was deleted."""
    bound = (record.limited_by if record else None) or {}
    if record is None or bound.get("kind") != "budget" or "id" not in bound:
        return None
    row = Budget.objects.for_tenant(tenant_id).filter(pk=bound["id"]).first()
    if row is None:
        return None
    periods = BudgetPeriod.objects.for_tenant(tenant_id).filter(budget_id=row.pk, period_start__lte=record.started_at)
    return _held_from(row, periods.order_by("-period_start").first())


def _held_from(row: Budget, budget_period: BudgetPeriod | None) -> HeldFrom:
    now = datetime.now(UTC)
    raised = row.active_increase(now)
    return HeldFrom(
        row.pk,
        row.name,
        row.unit,
        row.period,
        budget_scope(row),
        row.mode,
        row.amount,
        row.limit_in(budget_period, now),
        raised,
        row.increase_expires_at if raised else None,
    )


def budget_scope(budget: Budget) -> str:
    """Return the level of a budget: `tenant`, `project`, `key` or `member`."""
    named = {"project": budget.project_id, "key": budget.key_id, "member": budget.member_id}
    return next((scope for scope, pk in named.items() if pk), "tenant")
