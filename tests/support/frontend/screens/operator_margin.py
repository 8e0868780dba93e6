"""The screen of the operators' margin, with costs of two deployments."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.models import DailyCost, ExecutionCost, UsageEvent  # here: this file is read before Django is set up
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    now, tenant_id = datetime.now(UTC), world.tenants["populated"].pk
    with all_tenants_scope(BypassReason.COMMAND):
        used = UsageEvent.objects.all_tenants().filter(tenant_id=tenant_id).order_by("-admitted_at").first()
        assert used is not None
        tokens = {"uncached": 1000, "cache_read": 0, "cache_write_5m": 0, "cache_write_1h": 0, "output": 200}
        ExecutionCost.objects.create(
            admitted_at=used.admitted_at,
            request_id=used.request_id,
            execution=used.execution,
            tenant_id=tenant_id,
            model=used.model,
            is_tenant_credential=False,
            usage_source="upstream",
            outcome="completed",
            **tokens,
            cost_femto=10**12,
            uncosted_tokens=0,
            unbilled_femto=0,
            booked_at=now,
        )
        for model, failed in ((used.model, 0), ("other-upstream", 10**11)):
            DailyCost.objects.create(
                day=now.date(),
                tenant_id=tenant_id,
                model=model,
                credential_id=0,
                executions=1,
                estimated=0,
                cost_femto=10**12,
                failed_femto=failed,
                uncosted_tokens=0,
                unbilled_femto=failed,
            )


register(
    Screen("operator-margin", "/operator/margin/", queries=30, who="operator", states=("populated", "error")),
    prepare=prepare,
)
