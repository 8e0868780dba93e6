"""Registers the operators' alerts; the health events are those of what ops_health makes."""

from __future__ import annotations

from datetime import timedelta

from tests.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.actions.budgets import do_make_budget  # here: this file is read before Django is set up
    from billing.models import BudgetAlert, Window
    from billing.usage import this_month
    from tenants.roles import SystemUse
    from tenants.scoping import system

    start, _ = this_month()
    for state in ("populated", "over"):
        tenant = world.tenants[state]
        budget = do_make_budget(tenant, name="Alerted", unit="money", period="month", amount=10**11)
        with system(SystemUse.COMMAND):
            window = Window.objects.create(
                tenant_id=tenant.pk,
                budget_id=budget.pk,
                unit="money",
                period_start=start,
                period_end=start + timedelta(days=31),
                used=97 * 10**15,
            )
            for threshold, used in (("50", 50), ("80", 81), ("100", 100), (BudgetAlert.FORECAST, 60)):
                BudgetAlert.objects.create(
                    tenant=tenant,
                    budget=budget,
                    window=window,
                    threshold=threshold,
                    used=used * 10**9,
                    limit=10**11,
                    forecast=12 * 10**10 if threshold == BudgetAlert.FORECAST else None,
                )


register(
    Screen("ops-alerts", "/ops/alerts/", queries=18, who="operator", states=("populated", "error")),
    Screen("ops-alerts-budgets", "/ops/alerts/?show=budgets", queries=18, who="operator", states=("populated",)),
    prepare=prepare,
)
