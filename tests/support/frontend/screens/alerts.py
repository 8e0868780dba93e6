"""Screens of alerts and channels. The budgets' screens create the alerts."""

from __future__ import annotations

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.models import BudgetAlert  # here: Django is not set up on import
    from tenants.actions.channels import do_create_pagerduty_channel
    from tenants.isolation.scopes import tenant_scope

    tenant = world.tenants["populated"]
    do_create_pagerduty_channel(tenant, "k" * 32, description="On call")
    with tenant_scope(tenant):
        alert = BudgetAlert.objects.for_tenant(tenant).order_by("pk").first()
    world.rows["populated.alert"] = alert.pk if alert else 0


register(
    Screen("alerts", "/t/{slug}/alerts/", queries=30),
    Screen("alerts-slack", "/t/{slug}/alerts/slack", queries=12, states=("populated",)),
    Screen("alerts-pagerduty", "/t/{slug}/alerts/pagerduty", queries=12, states=("populated",)),
    Screen("budgets-mute", "/t/{slug}/budgets/{budget}/mute", queries=14, states=("populated",)),
    prepare=prepare,
    theirs={"alert": lambda world: world.rows["populated.alert"]},
)
