"""Screen of the operators' audit log, filled by the creation of the tenants."""

from __future__ import annotations

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants.models import AuditEntry  # here: this file is read before Django is set up
    from tests.support.rows import unscoped

    world.rows["populated.audit_entry"] = unscoped(AuditEntry).order_by("-pk")[0].pk


register(
    Screen("operator-audit", "/operator/audit/", queries=14, who="operator", states=("populated", "error")),
    Screen(
        "operator-audit-filtered", "/operator/audit/?tenant=acme&action=key", 15, who="operator", states=("populated",)
    ),
    Screen("operator-audit-detail", "/operator/audit/{audit_entry}", queries=14, who="operator", states=("populated",)),
    prepare=prepare,
)
