"""The pages of 403 and 404: inside the layout of the page, with the reason and a way back."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views import defaults

from frontend.core.labels import choice_label
from frontend.core.layout import Breadcrumb, layout_for, user_layout
from frontend.core.navigation import screen_of
from frontend.core.page_context import MissingPermission, PageContext, context_of
from tenants.authentication import accesses
from tenants.models import Membership, User
from tenants.permissions import ROLES, Permission

MAX_NAMES = 3  # members to ask


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Return the page of a missing permission: the roles that have it, the user's role, and whom to ask."""
    ctx = context_of(request)
    if ctx is None:
        reason = _("You view organizations as an operator. The view is read-only.")
        user = getattr(request, "user", None)
        if isinstance(user, User) and user.is_staff and request.path_info.startswith("/t/"):
            return _user_page(request, user, _("Access denied"), (reason,), HTTPStatus.FORBIDDEN)
        return defaults.permission_denied(
            request, exception if isinstance(exception, PermissionDenied) else Exception()
        )
    needs = exception.needs if isinstance(exception, MissingPermission) else None
    return _page(ctx, _("Access denied"), _denials(ctx, needs), HTTPStatus.FORBIDDEN)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Return the page of an unknown URL, or of a row or organization that the user cannot see."""
    ctx = context_of(request)
    if ctx is not None:
        text = _("Nothing is at this URL. It was deleted, or the link is wrong.")
        return _page(ctx, _("Page not found"), (text,), HTTPStatus.NOT_FOUND)
    user = getattr(request, "user", None)
    if not isinstance(user, User):
        return defaults.page_not_found(request, exception if isinstance(exception, Http404) else Http404())
    text = _("The URL is wrong, or you don’t have access. You are signed in as %(email)s.") % {"email": user.email}
    return _user_page(request, user, _("Page not found"), (text,), HTTPStatus.NOT_FOUND)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Return the page of a form whose token is not that of the session."""
    text = _("You signed in or out in another tab, or your browser blocks cookies. Go back, reload and send it again.")
    user = getattr(request, "user", None)
    if isinstance(user, User):
        return _user_page(request, user, _("Access denied"), (text,), HTTPStatus.FORBIDDEN)
    return render(request, "403_csrf.html", {"reason": text}, status=HTTPStatus.FORBIDDEN)


def _denials(ctx: PageContext, needs: Permission | None) -> tuple[str, ...]:
    """Return why the user may not open the page, and whom to ask."""
    role = None if ctx.access is None else ctx.access.role
    if role is None:
        return (_("You view organizations as an operator. The view is read-only."),)
    values = {"role": _role_label(role)}
    if needs is None:
        reason = _("Your role does not permit this. You are %(role)s.") % values
    else:
        values["roles"] = _join([_role_label(name) for name in reversed(list(ROLES)) if needs in ROLES[name]])
        screen = screen_of(ctx)
        if screen is not None and screen.needs == needs:
            reason = _("To open %(screen)s, you need the role %(roles)s. You are %(role)s.")
            values["screen"] = str(screen.label)
        else:
            reason = _("For this page, you need the role %(roles)s. You are %(role)s.")
        reason %= values
    names = _administrators(ctx)
    return (reason, _("Ask %(names)s.") % {"names": _join(names)}) if names else (reason,)


def _administrators(ctx: PageContext) -> list[str]:
    """Return the names of members who can change roles, owners first."""
    roles = [name for name in ROLES if Permission.MEMBERS_WRITE in ROLES[name]]
    with ctx.scope():
        rows = list(
            Membership.objects.for_tenant(ctx.tenant)
            .filter(role__in=roles, user__is_active=True)
            .exclude(user=ctx.user)
            .select_related("user")
            .order_by("pk")
        )
    rows.sort(key=lambda row: roles.index(row.role))
    return [row.user.name or row.user.email for row in rows[:MAX_NAMES]]


def _role_label(role: str) -> str:
    return choice_label(Membership.Role(role).label)


def _join(names: list[str]) -> str:
    """Return names as text: Billing, Admin or Owner."""
    if len(names) < 2:
        return "".join(names)
    return _("%(names)s or %(last)s") % {"names": ", ".join(names[:-1]), "last": names[-1]}


def _page(ctx: PageContext, title: str, texts: tuple[str, ...], status: HTTPStatus) -> HttpResponse:
    """Return the page inside the layout of the context, with a link to the list that it belongs to."""
    screen = screen_of(ctx)
    label, url = _("Overview"), ctx.url("overview") if ctx.access else reverse("home")
    breadcrumbs: tuple[Breadcrumb, ...] = ()
    if screen is not None and ctx.may(screen.needs):
        label, url = str(screen.label), ctx.url(screen.route)
        breadcrumbs = (Breadcrumb(label, url),)
    context = {"ctx": ctx, "layout": layout_for(ctx, title, breadcrumbs), "back": url, "label": label}
    return _render(ctx.request, title, texts, status, context)


def _user_page(
    request: HttpRequest, user: User, title: str, texts: tuple[str, ...], status: HTTPStatus
) -> HttpResponse:
    """Return the page inside the layout of pages without a tenant."""
    tenants = [] if user.is_staff else [access.tenant for access in accesses(user)]
    label = _("Overview") if len(tenants) == 1 else _("Console")
    context = {"layout": user_layout(request, title, tenants), "back": reverse("home"), "label": label}
    return _render(request, title, texts, status, context)


def _render(
    request: HttpRequest, title: str, texts: tuple[str, ...], status: HTTPStatus, context: Mapping[str, object]
) -> HttpResponse:
    is_fragment = request.headers.get("HX-Request") == "true"
    base = {"base_template": "frontend/fragment.html" if is_fragment else "frontend/base.html"}
    response = render(
        request, "frontend/error.html", {**base, "title": title, "texts": texts, **context}, status=status
    )
    response.headers["X-Reason"] = quote(" ".join(texts))  # for the script, which shows it if a part of a page fails
    return response
