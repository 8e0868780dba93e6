"""The layout around every page: navigation, breadcrumbs and user menu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from frontend.core import timezones
from frontend.core.bell import Bell, bell_of
from frontend.core.impersonation import ImpersonationSession, impersonation_of
from frontend.core.labels import choice_label
from frontend.core.navigation import Link, Section, sections
from frontend.core.page_context import PageContext
from tenants.models import Membership, Tenant, User

_MAX_TENANTS = 12


@dataclass(frozen=True)
class Breadcrumb:
    label: str
    url: str | None = None  # None for the current page


@dataclass(frozen=True)
class Layout:
    """The parts of base.html around the page."""

    title: str
    heading: str
    detail: str
    initials: str
    sections: tuple[Section, ...]
    tenants: tuple[Link, ...]  # other tenants of the user
    more: tuple[Link, ...]
    breadcrumbs: tuple[Breadcrumb, ...]
    palette: str | None  # the URL of the command palette's search
    shortcuts: str | None  # the URL of the list of keyboard shortcuts
    user_name: str
    user_email: str
    user_initials: str
    zone: str
    theme: str
    has_letters: bool  # keyboard shortcuts `g` + letter and `/`
    impersonation: ImpersonationSession | None  # the active impersonation
    bell: Bell | None  # None on a page without a tenant


def signed_in_user(request: HttpRequest) -> User:
    """Return the user of a request that passed `login_required`."""
    user = request.user
    if not isinstance(user, User):
        raise TypeError("this page is for people who are logged in")
    return user


def initials(name: str) -> str:
    """Return two letters for a name."""
    words = name.split() or ["?"]
    letters = words[0][0] + words[1][0] if len(words) > 1 else words[0][:2]
    return letters.upper()


def layout_for(ctx: PageContext, title: str, breadcrumbs: tuple[Breadcrumb, ...] = ()) -> Layout:
    """Return the layout of a tenant's or an operator's page."""
    if ctx.access is None:
        return _layout(
            ctx.request,
            ctx.user,
            title=f"{title} · Operator",
            heading="Millrace",
            detail=_("Operator"),
            sections=sections(ctx),
            breadcrumbs=(Breadcrumb(_("Operator"), reverse("home")), *breadcrumbs, Breadcrumb(title)),
            palette=reverse("operator-search"),
            shortcuts=reverse("operator-shortcuts"),
            bell=bell_of(ctx),
        )
    tenant, role = ctx.access.tenant, ctx.access.role
    others = (
        Link(other.name, reverse("overview", args=[other.slug]), "tenants") for other in ctx.others[:_MAX_TENANTS]
    )
    return _layout(
        ctx.request,
        ctx.user,
        title=f"{title} · {tenant.name}",
        heading=tenant.name,
        detail=choice_label(Membership.Role(role).label) if role else _("Read-only view"),
        sections=sections(ctx),
        breadcrumbs=(Breadcrumb(tenant.name, ctx.url("overview")), *breadcrumbs, Breadcrumb(title)),
        tenants=tuple(others),
        # The list of a user's only tenant redirects to that tenant.
        more=(_all_tenants(ctx.user),) if ctx.others or ctx.user.is_staff else (),
        palette=ctx.url("search"),
        shortcuts=ctx.url("shortcuts"),
        bell=bell_of(ctx),
    )


def user_layout(request: HttpRequest, title: str, tenants: Sequence[Tenant]) -> Layout:
    """Return the layout of a page without a tenant. `tenants` are those of the user; none for operators."""
    user = signed_in_user(request)
    link = _all_tenants(user)
    if len(tenants) == 1:
        link = Link(tenants[0].name, reverse("overview", args=[tenants[0].slug]), "tenants")
    return _layout(
        request,
        user,
        title=title,
        heading="Millrace",
        detail=_("Console"),
        sections=(Section("", (link,)),),
        breadcrumbs=(Breadcrumb(title),),
    )


def _all_tenants(user: User) -> Link:
    if user.is_staff:
        return Link(_("All tenants"), reverse("operator-tenants"), "tenants")
    return Link(_("All organizations"), reverse("home"), "tenants")


def _layout(
    request: HttpRequest,
    user: User,
    *,
    title: str,
    heading: str,
    detail: str,
    sections: tuple[Section, ...],
    breadcrumbs: tuple[Breadcrumb, ...],
    tenants: tuple[Link, ...] = (),
    more: tuple[Link, ...] = (),
    palette: str | None = None,
    shortcuts: str | None = None,
    bell: Bell | None = None,
) -> Layout:
    theme = request.COOKIES.get("theme", "")
    return Layout(
        title=title,
        heading=heading,
        detail=detail,
        initials=initials(heading),
        sections=sections,
        tenants=tenants,
        more=(*more, Link(_("API reference"), reverse("docs"), "reference")),
        breadcrumbs=breadcrumbs,
        palette=palette,
        shortcuts=shortcuts,
        user_name=user.name or user.email,
        user_email=user.email,
        user_initials=initials(user.name or user.email),
        zone=timezones.label(timezones.zone_of(request)),
        theme=theme if theme in ("light", "dark") else "system",
        has_letters=request.COOKIES.get("letters") != "off",
        impersonation=impersonation_of(request),
        bell=bell,
    )
