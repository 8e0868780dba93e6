"""Users as operators see them: the list with its filters, and one user."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from allauth.mfa.models import Authenticator
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import Choice, changed_url, text_param
from frontend.core.page_context import PageContext, first_or_404
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult
from tenants.models import AuditEntry, Membership, User
from tenants.reauthentication import SECOND_FACTORS

MAX_ROWS = 100  # users per page; others are found by search
MAX_CHANGES = 10
FILTERS = (
    ("", _lazy("All")),
    ("operators", _lazy("Operators")),
    ("unprotected", _lazy("Without 2FA")),
    ("deactivated", _lazy("Deactivated")),
)


def filters(ctx: PageContext) -> dict[str, Any]:
    chosen, url = ctx.query.get("show", ""), ctx.url("operator-users")
    links = [Choice(label, changed_url(ctx, url, show=name), name == chosen) for name, label in FILTERS]
    return {"typed": text_param(ctx, "q"), "chosen": chosen, "links": links}


def user_list(ctx: PageContext) -> dict[str, Any]:
    """Return the users that match, by email address, each with the number of its tenants."""
    rows = _select_users(ctx)
    found = list(rows[:MAX_ROWS])
    counts = Counter(Membership.objects.all_tenants().filter(user__in=found).values_list("user_id", flat=True))
    return {"rows": [(user, counts[user.pk]) for user in found], "number": rows.count()}


def _select_users(ctx: PageContext) -> QuerySet[User]:
    """Return the users that the filters of the page select, by email address."""
    typed, chosen = text_param(ctx, "q"), ctx.query.get("show", "")
    rows = _users().order_by("email")
    if typed:
        rows = rows.filter(Q(email__icontains=typed) | Q(name__icontains=typed))
    if chosen == "operators":
        rows = rows.filter(is_staff=True)
    elif chosen == "deactivated":
        rows = rows.filter(is_active=False)
    elif chosen == "unprotected":
        rows = rows.filter(is_active=True, has_factor=False)
    return rows


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the users with the page's filters. Call inside `ctx.scope()`."""
    found = list(_select_users(ctx)[:MAX_EXPORTED])
    members = Membership.objects.all_tenants().filter(user__in=found).order_by("tenant__slug")
    tenants = defaultdict[int, list[str]](list)
    for pk, slug in members.values_list("user_id", "tenant__slug"):
        tenants[pk].append(slug)
    for user in found:
        yield (
            *(user.pk, user.email, user.name, "active" if user.is_active else "deactivated"),
            *("yes" if user.is_staff else "no", "yes" if user.has_factor else "no"),  # type: ignore[attr-defined]
            *(" ".join(tenants[user.pk]), user.last_login.isoformat() if user.last_login else None),
        )


TOOLS = ListTools(
    "operator-users",
    exported=("id", "email", "name", "status", "operator", "two_factor", "tenants", "last_sign_in"),
    rows=export_rows,
    columns={},
)


def user_of(ctx: PageContext) -> User:
    """Return the user that the URL names, or raise Http404."""
    found: User = ctx.once("operator-user", lambda: first_or_404(_users().filter(pk=ctx.arguments["user"])))
    return found


def user_page(ctx: PageContext) -> dict[str, Any]:
    """Return the user, and the labels, names and icons of the actions that are possible."""
    user = user_of(ctx)
    offered = (
        (_("Remove 2FA"), "operator-users-remove-second-factor", "lock", user.has_factor),  # type: ignore[attr-defined]
        (_("Revoke operator rights"), "operator-users-revoke-operator", "undo", user.is_staff),
        (_("Grant operator rights"), "operator-users-grant-operator", "admin", not user.is_staff and user.is_active),
        (_("Deactivate"), "operator-users-deactivate", "ban", user.is_active),
        (_("Reactivate"), "operator-users-reactivate", "play", not user.is_active),
    )
    is_you = user.pk == ctx.user.pk
    return {"user": user, "is_you": is_you, "actions": [action for action in offered if action[3] and not is_you]}


def memberships(ctx: PageContext) -> list[Membership]:
    rows = Membership.objects.all_tenants().filter(user=user_of(ctx)).select_related("tenant")
    return list(rows.order_by("tenant__name"))


def changes(ctx: PageContext) -> list[AuditEntry]:
    """Return the latest audit entries about the user's login."""
    rows = AuditEntry.objects.all_tenants().filter(tenant_id=None, object_type="user", object_id=user_of(ctx).pk)
    return list(rows.order_by("-pk")[:MAX_CHANGES])


def _users() -> QuerySet[Any]:
    factor = Authenticator.objects.filter(user=OuterRef("pk"), type__in=SECOND_FACTORS)
    return User.objects.annotate(has_factor=Exists(factor))


def find_users(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield users by name or email address."""
    rows = User.objects.filter(Q(email__icontains=typed) | Q(name__icontains=typed))
    for user in rows.order_by("email")[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(user.email, ctx.url("operator-users-detail", user.pk), "members", user.name)
