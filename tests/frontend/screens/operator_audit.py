"""Registers the operators' audit log, which the making of the world has filled."""

from __future__ import annotations

from tests.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants.models import AuditEntry  # here: this file is read before Django is set up
    from tests.seeing import Everybody

    world.rows["populated.audit_entry"] = Everybody(AuditEntry).order_by("-pk")[0].pk


register(
    Screen("operator-audit", "/operator/audit/", queries=14, who="operator", states=("populated", "error")),
    Screen(
        "operator-audit-filtered", "/operator/audit/?tenant=acme&verb=key", 14, who="operator", states=("populated",)
    ),
    Screen("operator-audit-detail", "/operator/audit/{audit_entry}", queries=14, who="operator", states=("populated",)),
    prepare=prepare,
)
