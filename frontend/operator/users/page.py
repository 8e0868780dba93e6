"""Users as operators see them: the list with its filters, and one user."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from allauth.mfa.models import Authenticator
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import Http404

from frontend.core.layout import initials
from frontend.core.page_context import PageContext
from tenants.models import AuditEntry, Membership, User

MAX_ROWS = 100  # users per page; others are found by search
MAX_CHANGES = 10
FILTERS = (("", "All"), ("operators", "Operators"), ("unprotected", "Without 2FA"), ("deactivated", "Deactivated"))


@dataclass(frozen=True)
class UserRow:
    """One user of the list."""

    user: User
    url: str
    initials: str
    has_second_factor: bool
    tenants: int


@dataclass(frozen=True)
class UserList:
    rows: tuple[UserRow, ...]
    number: int


@dataclass(frozen=True)
class FilterLink:
    label: str
    url: str
    is_chosen: bool


@dataclass(frozen=True)
class UserAdminFilters:
    typed: str
    chosen: str
    links: tuple[FilterLink, ...]


@dataclass(frozen=True)
class UserAction:
    """A button of the user's page."""

    label: str
    url: str
    icon: str


@dataclass(frozen=True)
class UserPage:
    user: User
    is_you: bool
    has_second_factor: bool
    actions: tuple[UserAction, ...]


@dataclass(frozen=True)
class MembershipRow:
    tenant: str
    slug: str
    url: str
    role: str
    since: datetime


@dataclass(frozen=True)
class UserChange:
    at: datetime
    action: str
    actor: str
    url: str


def filters(ctx: PageContext) -> UserAdminFilters:
    typed, chosen = _typed(ctx), ctx.query.get("show", "")
    links = (FilterLink(label, _url(ctx, typed, name), name == chosen) for name, label in FILTERS)
    return UserAdminFilters(typed, chosen, tuple(links))


def user_list(ctx: PageContext) -> UserList:
    """Return the users that match, by email address."""
    typed, chosen = _typed(ctx), ctx.query.get("show", "")
    rows = _users().order_by("email")
    if typed:
        rows = rows.filter(Q(email__icontains=typed) | Q(name__icontains=typed))
    if chosen == "operators":
        rows = rows.filter(is_staff=True)
    elif chosen == "deactivated":
        rows = rows.filter(is_active=False)
    elif chosen == "unprotected":
        rows = rows.filter(is_active=True, has_factor=False)
    found = list(rows[:MAX_ROWS])
    counts: dict[int, int] = {}
    for user_id in Membership.objects.all_tenants().filter(user__in=found).values_list("user_id", flat=True):
        counts[user_id] = counts.get(user_id, 0) + 1
    return UserList(
        tuple(
            UserRow(
                user,
                ctx.url("operator-users-detail", user.pk),
                initials(user.name or user.email),
                user.has_factor,
                counts.get(user.pk, 0),
            )
            for user in found
        ),
        rows.count(),
    )


def user_of(ctx: PageContext) -> User:
    """Return the user that the URL names.

    Raises:
        Http404: there is none.
    """

    def find() -> User:
        found: User | None = _users().filter(pk=ctx.arguments["user"]).first()
        if found is None:
            raise Http404
        return found

    return ctx.once("operator-user", find)


def user_page(ctx: PageContext) -> UserPage:
    user = user_of(ctx)
    has_factor: bool = user.has_factor  # type: ignore[attr-defined]  # annotated in _users
    is_you = user.pk == ctx.user.pk
    offered = (
        ("Remove 2FA", "remove-second-factor", "lock", has_factor),
        ("Revoke operator rights", "revoke-operator", "undo", user.is_staff),
        ("Grant operator rights", "grant-operator", "admin", not user.is_staff and user.is_active),
        ("Deactivate", "deactivate", "ban", user.is_active),
        ("Reactivate", "reactivate", "play", not user.is_active),
    )
    actions = (
        UserAction(label, ctx.url(f"operator-users-{name}", user.pk), icon)
        for label, name, icon, is_possible in offered
        if is_possible and not is_you
    )
    return UserPage(user, is_you, has_factor, tuple(actions))


def memberships(ctx: PageContext) -> tuple[MembershipRow, ...]:
    rows = Membership.objects.all_tenants().filter(user=user_of(ctx)).select_related("tenant").order_by("tenant__name")
    return tuple(
        MembershipRow(
            row.tenant.name,
            row.tenant.slug,
            ctx.url("operator-tenants-detail", row.tenant_id),
            row.get_role_display(),
            row.created_at,
        )
        for row in rows
    )


def changes(ctx: PageContext) -> tuple[UserChange, ...]:
    """Return the latest audit entries about the user's login."""
    rows = AuditEntry.objects.all_tenants().filter(tenant_id=None, object_type="user", object_id=user_of(ctx).pk)
    latest = rows.order_by("-pk")[:MAX_CHANGES]
    return tuple(
        UserChange(row.created_at, row.action, row.actor, ctx.url("operator-audit-detail", row.pk)) for row in latest
    )


def _users() -> QuerySet[Any]:
    factor = Authenticator.objects.filter(user=OuterRef("pk"), type=Authenticator.Type.TOTP)
    return User.objects.annotate(has_factor=Exists(factor))


def _typed(ctx: PageContext) -> str:
    return ctx.query.get("q", "").strip()[:100].replace("\0", "")


def _url(ctx: PageContext, typed: str, chosen: str) -> str:
    context = {name: value for name, value in (("q", typed), ("show", chosen)) if value}
    return f"{ctx.url('operator-users')}?{urlencode(context)}" if context else ctx.url("operator-users")
