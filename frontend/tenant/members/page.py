"""Members, open invitations, and what each role may do, as the page shows them."""

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
MOST = 200  # shown at once; the filter finds the others
Role = Membership.Role
# What each permission lets one do, in the order in which a row of the table says it.
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
    change_url: str  # empty: this person may not
    remove_url: str


@dataclass(frozen=True)
class MemberListPanel:
    rows: tuple[Member, ...]
    filtered: bool
    more: bool
    unprotected: int  # of those shown, how many have no second factor


@dataclass(frozen=True)
class Invited:
    email: str
    role: str
    by: str
    at: datetime
    expires_at: datetime
    has_expired: bool
    resend_url: str
    withdraw_url: str


@dataclass(frozen=True)
class MemberCell:
    role: str
    may: str  # empty: nothing


@dataclass(frozen=True)
class Area:
    name: str
    asks_again: bool
    cells: tuple[MemberCell, ...]


@dataclass(frozen=True)
class Roles:
    names: tuple[str, ...]
    areas: tuple[Area, ...]


def may_touch(visit: PageContext, *roles: str) -> bool:
    """Whether the person may make, change or remove members of these roles: owners are owners' business."""
    return visit.may(P.MEMBERS_WRITE) and (Role.OWNER not in roles or visit.may(P.OWNERS_WRITE))


def memberships(visit: PageContext) -> QuerySet[Membership]:
    """Return the tenant's members with their users. In the visit's scope."""
    found: QuerySet[Membership] = Membership.objects.for_tenant(visit.tenant).select_related("user")
    return found


def pending(visit: PageContext) -> QuerySet[Invitation]:
    """Invitations that were neither accepted nor taken back. In the visit's scope."""
    found: QuerySet[Invitation] = Invitation.objects.for_tenant(visit.tenant).filter(
        accepted_at__isnull=True, revoked_at__isnull=True
    )
    return found


def members(visit: PageContext) -> MemberListPanel:
    """People, owners first."""
    typed = visit.query.get("q", "").strip()[:100].replace("\0", "")
    factor = Authenticator.objects.filter(user=OuterRef("user"), type=Authenticator.Type.TOTP)
    rows = memberships(visit).annotate(has_factor=Exists(factor)).order_by("user__email")
    if typed:
        rows = rows.filter(Q(user__email__icontains=typed) | Q(user__name__icontains=typed))
    found = list(rows[: MOST + 1])
    order = [str(role) for role in Role.values]
    shown = sorted(found[:MOST], key=lambda row: order.index(row.role))
    return MemberListPanel(
        rows=tuple(_member(visit, row) for row in shown),
        filtered=bool(typed),
        more=len(found) > MOST,
        unprotected=sum(not row.has_factor for row in shown),
    )


def invited(visit: PageContext) -> tuple[Invited, ...]:
    """Open invitations, also those whose time is over, newest first."""
    rows = pending(visit).select_related("invited_by").order_by("-pk")[:MOST]
    return tuple(_invited(visit, row) for row in rows)


def roles() -> Roles:
    """Return the table of `tenants.permissions`, in words."""
    labels = [Role(name).label for name in ROLES]
    areas = []
    for name, words in AREAS:
        cells = tuple(
            MemberCell(label, ", ".join(word for permission, word in words if permission in ROLES[role]))
            for label, role in zip(labels, ROLES, strict=True)
        )
        areas.append(Area(name, any(permission in STEP_UP for permission, _ in words), cells))
    return Roles(tuple(labels), tuple(areas))


def _member(visit: PageContext, row: Membership) -> Member:
    user, mine = row.user, may_touch(visit, row.role)
    return Member(
        name=user.name,
        email=user.email,
        initials=initials(user.name or user.email),
        role=row.get_role_display(),
        has_second_factor=row.has_factor,  # type: ignore[attr-defined]  # annotated above
        last_login=user.last_login,
        since=row.created_at,
        is_you=user.pk == visit.user.pk,
        change_url=visit.url("members-role", row.pk) if mine else "",
        remove_url=visit.url("members-remove", row.pk) if mine and user.pk != visit.user.pk else "",
    )


def _invited(visit: PageContext, row: Invitation) -> Invited:
    mine = may_touch(visit, row.role)
    return Invited(
        email=row.email,
        role=row.get_role_display(),
        by=row.invited_by.email if row.invited_by else "Operator",
        at=row.created_at,
        expires_at=row.expires_at,
        has_expired=row.expires_at <= visit.now,
        resend_url=visit.url("members-resend", row.pk) if mine else "",
        withdraw_url=visit.url("members-withdraw", row.pk) if mine else "",
    )
