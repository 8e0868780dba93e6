"""Screen of usage. The rows of other screens supply request records and cache misses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.support.frontend.console import Screen, World, register

if TYPE_CHECKING:
    from tenants.models import Tenant


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
    _warm(tenant)


def _warm(tenant: Tenant) -> None:
    """Add a run of cache warming, and a job that has failed."""
    from millrace.apps.answer_caches.models import WarmedPrompt  # here: Django is not set up on import
    from tenants.isolation.scopes import tenant_scope
    from tenants.models import TenantJob

    now = datetime.now(UTC)
    fields: dict[str, Any] = {
        "key_id": 1,
        "model": "smollm2-135m",
        "source_request_id": "req_1",
        "fingerprint": b"f",
        "batch_id": 1,
    }
    fields |= {"created_at": now, "expires_at": now, "expected_femto": 1, "max_femto": 10**12, "tenant_id": tenant.pk}
    with tenant_scope(tenant):
        WarmedPrompt.objects.create(
            batch_line=0, cache="answer", request_id="req_w", cost_femto=10**12, hits=2, **fields
        )
        WarmedPrompt.objects.create(batch_line=1, cache="prefix", **fields)
        TenantJob.objects.create(
            tenant=tenant,
            kind="cache-warming.run",
            permission="tenant.update",
            actor={},
            status="failed",
            error="The tenant is suspended.",
        )


register(
    Screen("usage", "/t/{slug}/usage/", queries=40),
    Screen("usage-explorer", "/t/{slug}/usage/explorer/?group=key", queries=38),
    Screen("usage-explorer-users", "/t/{slug}/usage/explorer/?group=end_user", 38, states=("populated",)),
    Screen("usage-explorer-success", "/t/{slug}/usage/explorer/?measure=success&range=12w", 38, states=("populated",)),
    Screen("usage-routes", "/t/{slug}/usage/?range=7d&group=route&model=smollm2-135m", 33, states=("populated",)),
    Screen("usage-warming", "/t/{slug}/usage/warming/", queries=34),
    Screen("usage-warming-run", "/t/{slug}/usage/warming/run", 14, states=("populated",)),
    prepare=prepare,
    theirs={"export": lambda world: world.rows["populated.export"]},
)
