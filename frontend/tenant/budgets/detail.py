"""The page of one budget."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.http import Http404

from billing.models import Budget, BudgetAlert, BudgetPeriod
from frontend.core.gauges import Gauge
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.alerts import BudgetAlertsAlerts, alerts
from frontend.tenant.budgets.amounts import BudgetAmount, typed
from frontend.tenant.budgets.dry_runs import Sentence, of_budget
from frontend.tenant.budgets.page import MODES, PERIODS, BudgetPageStatus, gauge, mode_kind, stand
from frontend.tenant.budgets.scopes import whose
from tenants.permissions import Permission

PAST = 12


@dataclass(frozen=True)
class BudgetDetailHeader:
    name: str
    whose: str
    mode: str
    mode_kind: str
    removed: bool
    is_raised: bool
    raise_url: str
    end_url: str
    edit_url: str
    remove_url: str


@dataclass(frozen=True)
class Now:
    """Current period."""

    used: BudgetAmount
    reserved: BudgetAmount
    left: BudgetAmount
    limit: BudgetAmount
    percent: int
    gauge: Gauge
    period: str
    began_at: datetime | None
    resets_at: datetime | None
    amount: BudgetAmount
    raised: BudgetAmount | None
    raised_until: datetime | None
    rolled_over: BudgetAmount | None
    cap: BudgetAmount | None
    reduces_max_tokens: bool
    thresholds: tuple[int, ...]
    by_forecast: bool


@dataclass(frozen=True)
class PeriodRow:
    start: datetime
    end: datetime | None
    used: BudgetAmount
    reserved: BudgetAmount
    rolled_over: BudgetAmount
    refused: int


@dataclass(frozen=True)
class Past:
    rows: tuple[PeriodRow, ...]
    counts_refused: bool


def budget_of(visit: PageContext) -> Budget:
    """Return the budget that the address names. In the visit's scope."""
    pk = visit.arguments["budget"]
    rows = Budget.objects.for_tenant(visit.tenant).select_related("project", "key__project", "member")
    found = visit.once(("budget", pk), lambda: rows.filter(pk=pk).first())
    if found is None:
        raise Http404
    return found


def _standing(visit: PageContext) -> BudgetPageStatus:
    budget = budget_of(visit)
    return visit.once(("standing", budget.pk), lambda: stand(visit, [budget])[0])


def head(visit: PageContext) -> BudgetDetailHeader:
    one = _standing(visit)
    budget = one.budget
    writes = visit.may(Permission.LIMITS_WRITE) and budget.active
    return BudgetDetailHeader(
        budget.name,
        whose(budget).label,
        MODES[budget.mode] if budget.active else "Removed",
        mode_kind(one) if budget.active else "",
        not budget.active,
        one.raised is not None,
        visit.url("budgets-raise", budget.pk) if writes else "",
        visit.url("budgets-lower", budget.pk) if writes and one.raised else "",
        visit.url("budgets-edit", budget.pk) if writes else "",
        visit.url("budgets-remove", budget.pk) if writes else "",
    )


def now(visit: PageContext) -> Now:
    """How it stands, and what it does."""
    one = _standing(visit)
    budget = one.budget
    sent: set[str] = set()
    if one.budget_period:
        rows = BudgetAlert.objects.for_tenant(visit.tenant).filter(budget_period=one.budget_period)
        sent = set(rows.values_list("threshold", flat=True))
    amount = BudgetAmount.whole(budget.unit, budget.amount)
    return Now(
        one.used,
        one.reserved,
        one.left,
        one.limit,
        one.percent,
        gauge(one, sent),
        PERIODS[budget.period],
        one.budget_period.period_start if one.budget_period else None,
        one.ends,
        amount,
        one.raised,
        budget.increase_expires_at,
        one.rolled_over,
        BudgetAmount.whole(budget.unit, budget.rollover_limit) if budget.rollover_limit else None,
        budget.reduce_max_tokens,
        tuple(budget.thresholds),
        budget.alert_forecast and budget.period == Budget.Period.MONTH,
    )


def trial(visit: PageContext) -> Sentence:
    """Return what it does, and would have refused last week."""
    budget = budget_of(visit)
    amount = typed(budget.amount, budget.unit)
    return of_budget(visit.tenant.pk, whose(budget), budget.mode, budget.unit, budget.period, amount)


def past(visit: PageContext) -> Past:
    """Its periods, the newest first."""
    budget = budget_of(visit)
    rows = BudgetPeriod.objects.for_tenant(visit.tenant).filter(budget_id=budget.pk).order_by("-period_start")[:PAST]
    return Past(
        tuple(
            PeriodRow(
                row.period_start,
                row.period_end,
                BudgetAmount(budget.unit, int(row.used)),
                BudgetAmount.whole(budget.unit, row.reserved),
                BudgetAmount.whole(budget.unit, row.rolled_over),
                row.rejected,
            )
            for row in rows
        ),
        budget.mode == Budget.Mode.DRY_RUN,
    )


def told(visit: PageContext) -> BudgetAlertsAlerts:
    return alerts(visit, budget_of(visit).pk)
