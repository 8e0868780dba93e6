"""View models of one budget's page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.http import Http404

from billing.models import Budget, BudgetAlert, BudgetPeriod
from frontend.core.gauges import Gauge
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.alerts import BudgetAlertList, alerts
from frontend.tenant.budgets.amounts import BudgetAmount, input_text
from frontend.tenant.budgets.dry_runs import BudgetSimulation, simulate_budget
from frontend.tenant.budgets.page import MODES, PERIODS, BudgetUsage, gauge, mode_kind, statuses_of
from frontend.tenant.budgets.scopes import owner_of
from tenants.permissions import Permission

MAX_PERIODS = 12


@dataclass(frozen=True)
class BudgetDetailHeader:
    name: str
    owner: str
    mode: str
    mode_kind: str
    removed: bool
    is_raised: bool
    raise_url: str
    end_url: str
    edit_url: str
    remove_url: str


@dataclass(frozen=True)
class CurrentPeriod:
    """The current period of a budget, with its settings."""

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
class PeriodHistory:
    rows: tuple[PeriodRow, ...]
    counts_refused: bool


def budget_of(ctx: PageContext) -> Budget:
    """Return the budget in the URL. Call inside `ctx.scope()`."""
    pk = ctx.arguments["budget"]
    rows = Budget.objects.for_tenant(ctx.tenant).select_related("project", "key__project", "member")
    found = ctx.once(("budget", pk), lambda: rows.filter(pk=pk).first())
    if found is None:
        raise Http404
    return found


def _status(ctx: PageContext) -> BudgetUsage:
    budget = budget_of(ctx)
    return ctx.once(("standing", budget.pk), lambda: statuses_of(ctx, [budget])[0])


def header(ctx: PageContext) -> BudgetDetailHeader:
    status = _status(ctx)
    budget = status.budget
    writes = ctx.may(Permission.LIMITS_WRITE) and budget.active
    return BudgetDetailHeader(
        budget.name,
        owner_of(budget).label,
        MODES[budget.mode] if budget.active else "Removed",
        mode_kind(status) if budget.active else "",
        not budget.active,
        status.raised is not None,
        ctx.url("budgets-raise", budget.pk) if writes else "",
        ctx.url("budgets-lower", budget.pk) if writes and status.raised else "",
        ctx.url("budgets-edit", budget.pk) if writes else "",
        ctx.url("budgets-remove", budget.pk) if writes else "",
    )


def current(ctx: PageContext) -> CurrentPeriod:
    """Return the current period."""
    status = _status(ctx)
    budget = status.budget
    sent: set[str] = set()
    if status.budget_period:
        rows = BudgetAlert.objects.for_tenant(ctx.tenant).filter(budget_period=status.budget_period)
        sent = set(rows.values_list("threshold", flat=True))
    amount = BudgetAmount.whole(budget.unit, budget.amount)
    return CurrentPeriod(
        status.used,
        status.reserved,
        status.left,
        status.limit,
        status.percent,
        gauge(status, sent),
        PERIODS[budget.period],
        status.budget_period.period_start if status.budget_period else None,
        status.ends,
        amount,
        status.raised,
        budget.increase_expires_at,
        status.rolled_over,
        BudgetAmount.whole(budget.unit, budget.rollover_limit) if budget.rollover_limit else None,
        budget.reduce_max_tokens,
        tuple(budget.thresholds),
        budget.alert_forecast and budget.period == Budget.Period.MONTH,
    )


def simulation(ctx: PageContext) -> BudgetSimulation:
    """Return the requests that the budget would have rejected last week."""
    budget = budget_of(ctx)
    amount = input_text(budget.amount, budget.unit)
    return simulate_budget(ctx.tenant.pk, owner_of(budget), budget.mode, budget.unit, budget.period, amount)


def history(ctx: PageContext) -> PeriodHistory:
    """Return the periods of the budget, newest first."""
    budget = budget_of(ctx)
    rows = (
        BudgetPeriod.objects.for_tenant(ctx.tenant).filter(budget_id=budget.pk).order_by("-period_start")[:MAX_PERIODS]
    )
    return PeriodHistory(
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


def budget_alerts(ctx: PageContext) -> BudgetAlertList:
    return alerts(ctx, budget_of(ctx).pk)
