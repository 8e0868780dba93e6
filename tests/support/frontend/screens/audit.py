"""Screen of the tenant's audit log, filled by the creation of the tenants."""

from __future__ import annotations

from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants.models import AuditEntry  # here: this file is read before Django is set up
    from tests.support.rows import unscoped

    world.rows["populated.entry"] = unscoped(AuditEntry).filter(tenant_id=world.tenants["populated"].pk)[0].pk


def _newest(tenant: Any) -> int:
    from tenants.models import AuditEntry

    return int(AuditEntry.objects.for_tenant(tenant).order_by("-pk")[0].pk)


ONE = ("populated",)
register(
    Screen("audit", "/t/{slug}/audit/", queries=24),
    Screen("audit-filtered", "/t/{slug}/audit/?action=member&from=2020-01-01", 16, states=ONE),
    Screen("audit-detail", "/t/{slug}/audit/{entry}", queries=16, states=ONE),
    prepare=prepare,
    theirs={"entry": lambda world: world.rows["populated.entry"]},
    demo={"entry": _newest},
)
