"""Screens of API keys of every kind, with their own and inherited limits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants import actions  # here: Django is not set up on import

    for state in ("populated", "over"):
        tenant, project = world.tenants[state], world.projects[state]
        support, search, _ = world.keys[state]
        now = datetime.now(UTC)
        actions.do_set_limits(tenant, {"requests_per_minute": 60, "tokens_per_day": 5_000_000}, key=support)
        actions.do_set_limits(tenant, {"concurrency": 8}, set_by_operator=True)
        actions.do_update_api_key(
            search,
            allowed_models=["smollm2-135m"],
            allowed_ip_ranges=["203.0.113.0/24"],
            cost_center="4711 Support",
            expires_at=now + timedelta(days=3),
        )
        actions.record_key_usage({support.pk: now})
        old, _ = actions.do_create_api_key(project, "old", created_by=world.owner)
        actions.do_rotate_api_key(old, timedelta(days=1))
        gone, _ = actions.do_create_api_key(project, "gone", created_by=world.owner)
        actions.do_revoke_api_key(gone)
        world.rows[f"{state}.key"] = support.pk
        world.rows[f"{state}.old"] = old.pk
        world.rows[f"{state}.project"] = project.pk


def _busiest(tenant: Any) -> int:
    from tenants.models import ApiKey

    pk: int = ApiKey.objects.for_tenant(tenant).filter(revoked_at=None).order_by("pk").values_list("pk", flat=True)[0]
    return pk


def _project(tenant: Any) -> int:
    from tenants.models import Project

    pk: int = Project.objects.for_tenant(tenant).values_list("pk", flat=True)[0]
    return pk


register(
    Screen("keys", "/t/{slug}/keys/", queries=40),
    Screen("keys-unlimited", "/t/{slug}/keys/?show=unlimited", queries=40, states=("populated", "empty")),
    Screen("keys-ended", "/t/{slug}/keys/?show=ended&q=go", queries=40, states=("populated",)),
    Screen("keys-detail", "/t/{slug}/keys/{key}/", queries=46, states=("populated", "over", "error")),
    Screen("keys-rotated", "/t/{slug}/keys/{old}/", queries=42, states=("populated",)),
    Screen("keys-new", "/t/{slug}/keys/new", queries=18, states=("populated", "empty")),
    Screen("keys-edit", "/t/{slug}/keys/{key}/edit", queries=18, states=("populated",)),
    Screen("keys-rotate", "/t/{slug}/keys/{key}/rotate", queries=14, states=("populated",)),
    Screen("keys-revoke", "/t/{slug}/keys/{key}/revoke", queries=16, states=("populated",)),
    Screen("keys-project-new", "/t/{slug}/projects/new", queries=12, states=("populated",)),
    Screen("keys-project", "/t/{slug}/projects/{project}/edit", queries=12, states=("populated",)),
    Screen("keys-project-delete", "/t/{slug}/projects/{project}/delete", queries=12, states=("populated",)),
    prepare=prepare,
    theirs={
        "key": lambda world: world.keys["populated"][0].pk,
        "project": lambda world: world.projects["populated"].pk,
    },
    demo={"key": _busiest, "old": _busiest, "project": _project},
)
