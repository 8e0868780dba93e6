"""View models of members, open invitations and role permissions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from allauth.mfa.models import Authenticator
from django.db.models import Exists, OuterRef, Q, QuerySet

from frontend.core.layout import initials
from frontend.core.page_context import PageContext
from tenants.models import Invitation, Membership
from tenants.permissions import ROLES, STEP_UP, Permission

P = Permission
MAX_MEMBERS = 200  # members per page; others are found by search
Role = Membership.Role
# Description of each permission, in table order.
AREAS: tuple[tuple[str, tuple[tuple[Permission, str], ...]], ...] = (
    ("Usage and requests", ((P.USAGE_READ, "see"),)),
    (
        "API keys",
        ((P.KEYS_READ, "see"), (P.KEYS_WRITE, "create, rotate, revoke"), (P.KEYS_MANAGE, "including management keys")),
    ),
    ("Projects", ((P.PROJECTS_READ, "see"), (P.PROJECTS_WRITE, "change"))),
    ("Budgets and limits", ((P.LIMITS_READ, "see"), (P.LIMITS_WRITE, "change"))),
    ("Routing", ((P.POLICIES_READ, "see"), (P.POLICIES_WRITE, "publish"))),
    ("Invoices and billing", ((P.BILLING_READ, "see"), (P.BILLING_WRITE, "change"))),
    ("Webhooks", ((P.WEBHOOKS_READ, "see"), (P.WEBHOOKS_WRITE, "change"))),
    ("Members", ((P.MEMBERS_READ, "see"), (P.MEMBERS_WRITE, "change"), (P.OWNERS_WRITE, "including owners"))),
    ("Settings", ((P.TENANT_READ, "see"), (P.TENANT_UPDATE, "change"), (P.TENANT_DELETE, "delete organization"))),
    ("Audit log", ((P.AUDIT_READ, "see"),)),
)


@dataclass(frozen=True)
class Member:
    name: str
    email: str
    initials: str
    role: str
    has_second_factor: bool
    last_login: datetime | None
    since: datetime
    is_you: bool
    change_url: str  # empty without permission
    remove_url: str


@dataclass(frozen=True)
class MemberListPanel:
    rows: tuple[Member, ...]
    filtered: bool
    more: bool
    unprotected: int  # number of shown members without 2FA


@dataclass(frozen=True)
class InvitationRow:
    email: str
    role: str
    by: str
    at: datetime
    expires_at: datetime
    has_expired: bool
    resend_url: str
    revoke_url: str


@dataclass(frozen=True)
class MemberCell:
    role: str
    may: str  # empty without permission


@dataclass(frozen=True)
class Area:
    name: str
    asks_again: bool
    cells: tuple[MemberCell, ...]


@dataclass(frozen=True)
class Roles:
    names: tuple[str, ...]
    areas: tuple[Area, ...]


def may_change(ctx: PageContext, *roles: str) -> bool:
    """Return whether the user may add, change or remove members of these roles. Only owners may change owners."""
    return ctx.may(P.MEMBERS_WRITE) and (Role.OWNER not in roles or ctx.may(P.OWNERS_WRITE))


def memberships(ctx: PageContext) -> QuerySet[Membership]:
    """Return the tenant's members with their users. Call inside `ctx.scope()`."""
    found: QuerySet[Membership] = Membership.objects.for_tenant(ctx.tenant).select_related("user")
    return found


def pending(ctx: PageContext) -> QuerySet[Invitation]:
    """Return invitations that were neither accepted nor revoked. Call inside `ctx.scope()`."""
    found: QuerySet[Invitation] = Invitation.objects.for_tenant(ctx.tenant).filter(
        accepted_at__isnull=True, revoked_at__isnull=True
    )
    return found


def members(ctx: PageContext) -> MemberListPanel:
    """Return the members, owners first."""
    typed = ctx.query.get("q", "").strip()[:100].replace("\0", "")
    factor = Authenticator.objects.filter(user=OuterRef("user"), type=Authenticator.Type.TOTP)
    rows = memberships(ctx).annotate(has_factor=Exists(factor)).order_by("user__email")
    if typed:
        rows = rows.filter(Q(user__email__icontains=typed) | Q(user__name__icontains=typed))
    found = list(rows[: MAX_MEMBERS + 1])
    order = [str(role) for role in Role.values]
    shown = sorted(found[:MAX_MEMBERS], key=lambda row: order.index(row.role))
    return MemberListPanel(
        rows=tuple(_member(ctx, row) for row in shown),
        filtered=bool(typed),
        more=len(found) > MAX_MEMBERS,
        unprotected=sum(not row.has_factor for row in shown),
    )


def invitations(ctx: PageContext) -> tuple[InvitationRow, ...]:
    """Return open invitations, also expired ones, newest first."""
    rows = pending(ctx).select_related("invited_by").order_by("-pk")[:MAX_MEMBERS]
    return tuple(_invitation_row(ctx, row) for row in rows)


def roles() -> Roles:
    """Return the table of role permissions from `tenants.permissions`."""
    labels = [Role(name).label for name in ROLES]
    areas = []
    for name, words in AREAS:
        cells = tuple(
            MemberCell(label, ", ".join(word for permission, word in words if permission in ROLES[role]))
            for label, role in zip(labels, ROLES, strict=True)
        )
        areas.append(Area(name, any(permission in STEP_UP for permission, _ in words), cells))
    return Roles(tuple(labels), tuple(areas))


def _member(ctx: PageContext, row: Membership) -> Member:
    user, may_edit = row.user, may_change(ctx, row.role)
    return Member(
        name=user.name,
        email=user.email,
        initials=initials(user.name or user.email),
        role=row.get_role_display(),
        has_second_factor=row.has_factor,  # type: ignore[attr-defined]  # annotated above
        last_login=user.last_login,
        since=row.created_at,
        is_you=user.pk == ctx.user.pk,
        change_url=ctx.url("members-role", row.pk) if may_edit else "",
        remove_url=ctx.url("members-remove", row.pk) if may_edit and user.pk != ctx.user.pk else "",
    )


def _invitation_row(ctx: PageContext, row: Invitation) -> InvitationRow:
    may_edit = may_change(ctx, row.role)
    return InvitationRow(
        email=row.email,
        role=row.get_role_display(),
        by=row.invited_by.email if row.invited_by else "Operator",
        at=row.created_at,
        expires_at=row.expires_at,
        has_expired=row.expires_at <= ctx.now,
        resend_url=ctx.url("members-resend", row.pk) if may_edit else "",
        revoke_url=ctx.url("members-invitation-revoke", row.pk) if may_edit else "",
    )
