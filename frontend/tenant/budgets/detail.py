"""One budget's page."""

from __future__ import annotations

from typing import Any

from billing.models import Budget, BudgetAlert, BudgetPeriod
from frontend.core.page_context import PageContext, first_or_404
from frontend.tenant.budgets.alerts import alerts
from frontend.tenant.budgets.amounts import BudgetAmount, input_text
from frontend.tenant.budgets.dry_runs import BudgetSimulation, simulate_budget
from frontend.tenant.budgets.page import BudgetUsage, gauge, statuses_of
from frontend.tenant.budgets.scopes import owner_of

MAX_PERIODS = 12


def budget_of(ctx: PageContext) -> Budget:
    """Return the budget in the URL. Call inside `ctx.scope()`."""
    pk = ctx.arguments["budget"]
    rows = Budget.objects.for_tenant(ctx.tenant).select_related("project", "key__project", "member")
    return ctx.once(("budget", pk), lambda: first_or_404(rows.filter(pk=pk)))


def status_of(ctx: PageContext) -> BudgetUsage:
    budget = budget_of(ctx)
    return ctx.once(("standing", budget.pk), lambda: statuses_of(ctx, [budget])[0])


def describe_period(ctx: PageContext) -> dict[str, Any]:
    """Return the current period of the budget, with its settings."""
    status = status_of(ctx)
    budget = status.budget
    sent: set[str] = set()
    if status.budget_period:
        rows = BudgetAlert.objects.for_tenant(ctx.tenant).filter(budget_period=status.budget_period)
        sent = set(rows.values_list("threshold", flat=True))
    return {
        "status": status,
        "budget": budget,
        "gauge": gauge(status, sent),
        "amount": BudgetAmount.from_units(budget.unit, budget.amount),
        "cap": BudgetAmount.from_units(budget.unit, budget.rollover_limit) if budget.rollover_limit else None,
        "by_forecast": budget.alert_forecast and budget.period == Budget.Period.MONTH,
    }


def simulation(ctx: PageContext) -> BudgetSimulation:
    """Return the requests that the budget would have rejected last week."""
    budget = budget_of(ctx)
    amount = input_text(budget.amount, budget.unit)
    return simulate_budget(ctx.tenant.pk, owner_of(budget), budget.mode, budget.unit, budget.period, amount)


def history(ctx: PageContext) -> dict[str, Any]:
    """Return the periods of the budget, newest first."""
    budget = budget_of(ctx)
    found = BudgetPeriod.objects.for_tenant(ctx.tenant).filter(budget_id=budget.pk).order_by("-period_start")
    rows = [
        {
            "period": row,
            "used": BudgetAmount(budget.unit, int(row.used)),
            "reserved": BudgetAmount.from_units(budget.unit, row.reserved),
            "rolled_over": BudgetAmount.from_units(budget.unit, row.rolled_over),
        }
        for row in found[:MAX_PERIODS]
    ]
    return {"rows": rows, "counts_refused": budget.mode == Budget.Mode.DRY_RUN}


def budget_alerts(ctx: PageContext) -> list[dict[str, Any]]:
    return alerts(ctx, budget_of(ctx).pk)
