"""Members, open invitations and role permissions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allauth.mfa.models import Authenticator
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils.translation import gettext as _

from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar, text_chip
from frontend.core.labels import choice_label
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import text_param
from frontend.core.page_context import PageContext
from tenants.models import Invitation, Membership
from tenants.permissions import ROLES, STEP_UP, Permission
from tenants.reauthentication import SECOND_FACTORS

P = Permission
MAX_MEMBERS = 200  # members per page; others are found by search
Role = Membership.Role
# Description of each permission, in table order.
AREAS: tuple[tuple[str, tuple[tuple[Permission, str], ...]], ...] = (
    (_lazy("Usage and requests"), ((P.USAGE_READ, _lazy("see")),)),
    (
        _lazy("API keys"),
        (
            (P.KEYS_READ, _lazy("see")),
            (P.KEYS_WRITE, _lazy("create, rotate, revoke")),
            (P.KEYS_MANAGE, _lazy("including management keys")),
        ),
    ),
    (_lazy("Projects"), ((P.PROJECTS_READ, _lazy("see")), (P.PROJECTS_WRITE, _lazy("change")))),
    (_lazy("Budgets and limits"), ((P.LIMITS_READ, _lazy("see")), (P.LIMITS_WRITE, _lazy("change")))),
    (_lazy("Routing"), ((P.POLICIES_READ, _lazy("see")), (P.POLICIES_WRITE, _lazy("publish")))),
    (_lazy("Invoices and billing"), ((P.BILLING_READ, _lazy("see")), (P.BILLING_WRITE, _lazy("change")))),
    (_lazy("Webhooks"), ((P.WEBHOOKS_READ, _lazy("see")), (P.WEBHOOKS_WRITE, _lazy("change")))),
    (
        _lazy("Members"),
        (
            (P.MEMBERS_READ, _lazy("see")),
            (P.MEMBERS_WRITE, _lazy("change")),
            (P.OWNERS_WRITE, _lazy("including owners")),
        ),
    ),
    (
        _lazy("Settings"),
        (
            (P.TENANT_READ, _lazy("see")),
            (P.TENANT_UPDATE, _lazy("change")),
            (P.TENANT_DELETE, _lazy("delete organization")),
        ),
    ),
    (_lazy("Audit log"), ((P.AUDIT_READ, _lazy("see")),)),
)


def may_change(ctx: PageContext, *roles: str) -> bool:
    """Return whether the user may add, change or remove members of these roles. Only owners may change owners."""
    return ctx.may(P.MEMBERS_WRITE) and (Role.OWNER not in roles or ctx.may(P.OWNERS_WRITE))


def memberships(ctx: PageContext) -> QuerySet[Membership]:
    """Return the tenant's members with their users. Call inside `ctx.scope()`."""
    found: QuerySet[Membership] = Membership.objects.for_tenant(ctx.tenant).select_related("user")
    return found


def find_invitations(ctx: PageContext) -> QuerySet[Invitation]:
    """Return invitations that were neither accepted nor revoked. Call inside `ctx.scope()`."""
    found: QuerySet[Invitation] = Invitation.objects.for_tenant(ctx.tenant).filter(
        accepted_at__isnull=True, revoked_at__isnull=True
    )
    return found


def filters(ctx: PageContext) -> FilterBar:
    """Return the search field and the chip of roles."""
    url, role = ctx.url("members"), ctx.query.get("role")
    roles = [(value, choice_label(label)) for value, label in Role.choices]
    search = text_chip(ctx, url, "q", _("Name or email address"), _("Name or email"))
    chosen = role if role in Role.values else None
    return filter_bar(ctx, url, (choice_chip(ctx, url, "role", _("Role"), roles, chosen),), search)


def _select_members(ctx: PageContext) -> QuerySet[Any]:
    """Return the members that the filters of the page select, with `has_factor`."""
    factor = Authenticator.objects.filter(user=OuterRef("user"), type__in=SECOND_FACTORS)
    rows: QuerySet[Any] = memberships(ctx).annotate(has_factor=Exists(factor)).order_by("user__email")
    if typed := text_param(ctx, "q"):
        rows = rows.filter(Q(user__email__icontains=typed) | Q(user__name__icontains=typed))
    if (role := ctx.query.get("role")) in Role.values:
        rows = rows.filter(role=role)
    return rows


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the members with the page's filters, by email address. Call inside `ctx.scope()`."""
    for row in _select_members(ctx)[:MAX_EXPORTED]:
        user = row.user
        last = user.last_login.isoformat() if user.last_login else None
        factor = "yes" if row.has_factor else "no"
        yield (user.email, user.name, row.role, factor, last, row.created_at.isoformat())


TOOLS = ListTools(
    "members",
    exported=("email", "name", "role", "two_factor", "last_sign_in", "member_since"),
    rows=export_rows,
    columns={
        "role": _lazy("Role"),
        "factor": _lazy("2FA"),
        "last": _lazy("Last sign-in"),
        "since": _lazy("Member since"),
    },
    views=((_lazy("All"), {}), (_lazy("Owners"), {"role": "owner"})),
)


def members(ctx: PageContext) -> dict[str, Any]:
    """Return the members, owners first."""
    found = list(_select_members(ctx)[: MAX_MEMBERS + 1])
    order = [str(role) for role in Role.values]
    shown = sorted(found[:MAX_MEMBERS], key=lambda row: order.index(row.role))
    return {
        "rows": [(row, row.user, may_change(ctx, row.role)) for row in shown],
        "filtered": any(ctx.query.get(name) for name in ("q", "role")),
        "more": len(found) > MAX_MEMBERS,
        "unprotected": sum(not row.has_factor for row in shown),
        "columns": TOOLS.read_columns(ctx),
        "headings": [*TOOLS.headings(ctx), _("!Actions")],
    }


def invitations(ctx: PageContext) -> list[tuple[Invitation, bool]]:
    """Return open invitations, also expired ones, newest first, and whether the user may change each."""
    rows = find_invitations(ctx).select_related("invited_by", "outbox_email").order_by("-pk")[:MAX_MEMBERS]
    return [(row, may_change(ctx, row.role)) for row in rows]


def roles() -> dict[str, Any]:
    """Return the table of role permissions from `tenants.permissions`."""
    labels = [choice_label(Role(name).label) for name in ROLES]
    areas = []
    for name, words in AREAS:
        allowed = (", ".join(str(word) for permission, word in words if permission in ROLES[role]) for role in ROLES)
        asks_again = any(permission in STEP_UP for permission, _ in words)
        areas.append((name, asks_again, list(zip(labels, allowed, strict=True))))
    return {"names": labels, "areas": areas}
