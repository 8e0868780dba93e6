"""Screen of usage. The rows of other screens supply request records and cache misses."""

from __future__ import annotations

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants.isolation.scopes import tenant_scope  # here: Django is not set up on import
    from tenants.models import TenantJob

    tenant = world.tenants["populated"]
    fields = {"kind": "usage.segments", "permission": "usage:read", "actor": {}, "content_type": "text/csv"}
    with tenant_scope(tenant):
        for status in ("queued", "completed"):
            job = TenantJob.objects.create(
                tenant=tenant, status=status, filename="a.csv", parameters={"filename": "a.csv"}, **fields
            )
    world.rows["populated.export"] = job.pk


register(
    Screen("usage", "/t/{slug}/usage/", queries=40),
    Screen("usage-explorer", "/t/{slug}/usage/explorer/?group=key", queries=38),
    Screen("usage-explorer-users", "/t/{slug}/usage/explorer/?group=end_user", 38, states=("populated",)),
    Screen("usage-explorer-success", "/t/{slug}/usage/explorer/?measure=success&range=12w", 38, states=("populated",)),
    Screen("usage-routes", "/t/{slug}/usage/?range=7d&group=route&model=smollm2-135m", 33, states=("populated",)),
    prepare=prepare,
    theirs={"export": lambda world: world.rows["populated.export"]},
)
