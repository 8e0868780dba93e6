"""Screen of the operators' alerts. The health events come from operator_health."""

from __future__ import annotations

from datetime import timedelta

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.budgets.budgets import do_make_budget  # here: this file is read before Django is set up
    from billing.metering.usage import this_month
    from billing.models import BudgetAlert, BudgetPeriod
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tenants.models import OutboxEmail

    start, _ = this_month()
    for state in ("populated", "over"):
        tenant = world.tenants[state]
        budget = do_make_budget(tenant, name="Alerted", unit="money", period="month", amount=10**11)
        with all_tenants_scope(BypassReason.COMMAND):
            budget_period = BudgetPeriod.objects.create(
                tenant_id=tenant.pk,
                budget_id=budget.pk,
                unit="money",
                period_start=start,
                period_end=start + timedelta(days=31),
                used=97 * 10**15,
            )
            given = {"tenant": tenant, "roles": ["owner"], "subject": "Alerted", "body": "Alerted"}
            why = {"error": "The mail server could not be reached."}
            mails = (
                OutboxEmail.objects.create(**given, sent_at=start, state="sent"),
                OutboxEmail.objects.create(**given, **why),
                OutboxEmail.objects.create(**given, **why, state="failed"),
                None,
            )
            alerts = (("50", 50), ("80", 81), ("100", 100), (BudgetAlert.FORECAST, 60))
            for (threshold, used), mail in zip(alerts, mails, strict=True):
                BudgetAlert.objects.create(
                    tenant=tenant,
                    budget=budget,
                    email=mail,
                    budget_period=budget_period,
                    threshold=threshold,
                    used=used * 10**9,
                    limit=10**11,
                    forecast=12 * 10**10 if threshold == BudgetAlert.FORECAST else None,
                )


register(
    Screen("operator-alerts", "/operator/alerts/", queries=18, who="operator", states=("populated", "error")),
    Screen(
        "operator-alerts-budgets", "/operator/alerts/?show=budgets", queries=18, who="operator", states=("populated",)
    ),
    prepare=prepare,
)
