"""Screens of members: several roles, a user who never signed in, and a pending and an expired invitation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants import actions  # here: Django is not set up on import
    from tenants.isolation.scopes import tenant_scope
    from tenants.models import Invitation, User

    for state in ("populated", "over"):
        tenant = world.tenants[state]
        for role in ("developer", "readonly"):
            user = User.objects.create_user(f"{role}@{tenant.slug}.example", name=f"A {role.capitalize()}")
            member = actions.do_add_member(tenant, user, role)
        world.rows[f"{state}.member"] = member.pk
        old = actions.do_invite(tenant, "late@example.com", "billing", by=world.owner)
        world.rows[f"{state}.invitation"] = actions.do_invite(tenant, "new@example.com", "admin").pk
        with tenant_scope(tenant):
            Invitation.objects.for_tenant(tenant).filter(pk=old.pk).update(
                expires_at=datetime.now(UTC) - timedelta(days=1)
            )


def _member(tenant: Any) -> int:
    from tenants.models import Membership

    return int(Membership.objects.for_tenant(tenant).order_by("-pk")[0].pk)


ONE = ("populated",)
register(
    Screen("members", "/t/{slug}/members/", queries=15),
    Screen("members-none-found", "/t/{slug}/members/?q=unknown", 15, states=ONE),
    Screen("members-invite", "/t/{slug}/members/invite", 10, states=ONE),
    Screen("members-role", "/t/{slug}/members/{member}/role", 12, states=ONE),
    Screen("members-remove", "/t/{slug}/members/{member}/remove", 12, states=ONE),
    Screen("members-leave", "/t/{slug}/members/leave", 12, states=ONE),
    prepare=prepare,
    theirs={
        "member": lambda world: world.rows["populated.member"],
        "invitation": lambda world: world.rows["populated.invitation"],
    },
    demo={"member": _member},
)
