"""The frame around every page: who is shown, where one is, and where one can go."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest
from django.urls import reverse

from frontend.core import timezones
from frontend.core.impersonation import Viewing, viewing
from frontend.core.navigation import Link, Section, sections
from frontend.core.page_context import PageContext
from tenants.models import Membership, User

_SHOWN_TENANTS = 12


@dataclass(frozen=True)
class Breadcrumb:
    label: str
    url: str | None = None  # None: this page


@dataclass(frozen=True)
class Shell:
    """The parts of base.html around the page."""

    title: str
    heading: str
    detail: str
    initials: str
    sections: tuple[Section, ...]
    tenants: tuple[Link, ...]  # to switch to
    more: tuple[Link, ...]
    breadcrumbs: tuple[Breadcrumb, ...]
    palette: str | None  # where the palette asks
    user_name: str
    user_email: str
    user_initials: str
    zone: str
    theme: str
    has_letters: bool  # whether `g` + letter and `/` are wanted
    viewing: Viewing | None  # what an operator reads as the tenant does


def signed_in(request: HttpRequest) -> User:
    """Return the person behind a request that `login_required` let through."""
    user = request.user
    if not isinstance(user, User):
        raise TypeError("this page is for people who are logged in")
    return user


def initials(name: str) -> str:
    """Two letters that stand for a name."""
    words = name.split() or ["?"]
    letters = words[0][0] + words[1][0] if len(words) > 1 else words[0][:2]
    return letters.upper()


def shell_for(visit: PageContext, title: str, breadcrumbs: tuple[Breadcrumb, ...] = ()) -> Shell:
    """Return the frame of this visit's page."""
    if visit.access is None:
        return _shell(
            visit.request,
            visit.user,
            title=f"{title} · Operator",
            heading="Millrace",
            detail="Operator",
            sections=sections(visit),
            breadcrumbs=(Breadcrumb("Operator", reverse("home")), *breadcrumbs, Breadcrumb(title)),
            palette=reverse("operator-search"),
        )
    tenant, role = visit.access.tenant, visit.access.role
    others = (
        Link(other.name, reverse("overview", args=[other.slug]), "tenants") for other in visit.others[:_SHOWN_TENANTS]
    )
    return _shell(
        visit.request,
        visit.user,
        title=f"{title} · {tenant.name}",
        heading=tenant.name,
        detail=Membership.Role(role).label if role else "Read-only view",
        sections=sections(visit),
        breadcrumbs=(Breadcrumb(tenant.name, visit.url("overview")), *breadcrumbs, Breadcrumb(title)),
        tenants=tuple(others),
        palette=visit.url("search"),
    )


def person_shell(request: HttpRequest, title: str) -> Shell:
    """Return the frame of a page that belongs to no tenant."""
    return _shell(
        request,
        signed_in(request),
        title=title,
        heading="Millrace",
        detail="Console",
        sections=(Section("", (Link("Organizations", reverse("home"), "tenants"),)),),
        breadcrumbs=(Breadcrumb(title),),
    )


def _shell(
    request: HttpRequest,
    user: User,
    *,
    title: str,
    heading: str,
    detail: str,
    sections: tuple[Section, ...],
    breadcrumbs: tuple[Breadcrumb, ...],
    tenants: tuple[Link, ...] = (),
    palette: str | None = None,
) -> Shell:
    all_tenants = (
        Link("All tenants", reverse("operator-tenants"), "tenants")
        if user.is_staff
        else Link("All organizations", reverse("home"), "tenants")
    )
    theme = request.COOKIES.get("theme", "")
    return Shell(
        title=title,
        heading=heading,
        detail=detail,
        initials=initials(heading),
        sections=sections,
        tenants=tenants,
        more=(all_tenants, Link("API reference", reverse("docs"), "reference")),
        breadcrumbs=breadcrumbs,
        palette=palette,
        user_name=user.name or user.email,
        user_email=user.email,
        user_initials=initials(user.name or user.email),
        zone=timezones.label(timezones.zone_of(request)),
        theme=theme if theme in ("light", "dark") else "system",
        has_letters=request.COOKIES.get("letters") != "off",
        viewing=viewing(request),
    )
