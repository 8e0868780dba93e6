"""Registers the operators' audit log, which the making of the world has filled."""

from __future__ import annotations

from tests.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants.models import AuditEntry  # here: this file is read before Django is set up
    from tests.seeing import Everybody

    world.rows["populated.audit_entry"] = Everybody(AuditEntry).order_by("-pk")[0].pk


register(
    Screen("ops-audit", "/ops/audit/", queries=14, who="operator", states=("populated", "error")),
    Screen("ops-audit-filtered", "/ops/audit/?tenant=acme&verb=key", 14, who="operator", states=("populated",)),
    Screen("ops-audit-one", "/ops/audit/{audit_entry}", queries=14, who="operator", states=("populated",)),
    prepare=prepare,
)
