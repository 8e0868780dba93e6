"""The frame around every page: who is shown, where one is, and where one can go."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest
from django.urls import reverse

from tenants.authentication import Access
from tenants.models import Membership, User


@dataclass(frozen=True)
class Link:
    label: str
    url: str
    icon: str  # the name of a symbol in icons.html
    current: bool = False


@dataclass(frozen=True)
class Crumb:
    label: str
    url: str | None = None  # None: this page


@dataclass(frozen=True)
class Shell:
    """What base.html shows besides the page itself."""

    title: str
    heading: str
    detail: str
    initials: str
    links: tuple[Link, ...]
    more: tuple[Link, ...]
    crumbs: tuple[Crumb, ...]
    user_name: str
    user_email: str


def signed_in(request: HttpRequest) -> User:
    """The person behind a request that `login_required` let through."""
    user = request.user
    if not isinstance(user, User):
        raise TypeError("this page is for people who are logged in")
    return user


def initials(name: str) -> str:
    """Two letters that stand for a name."""
    words = name.split() or ["?"]
    letters = words[0][0] + words[1][0] if len(words) > 1 else words[0][:2]
    return letters.upper()


def tenant_shell(user: User, access: Access, title: str) -> Shell:
    """The frame of a tenant's page."""
    tenant = access.tenant
    here = reverse("overview", args=[tenant.slug])
    return Shell(
        title=f"{title} · {tenant.name}",
        heading=tenant.name,
        detail=Membership.Role(access.role).label if access.role else "Seen as operator",
        initials=initials(tenant.name),
        links=(Link("Overview", here, "overview", current=title == "Overview"),),
        more=(_all_tenants(user), _reference()),
        crumbs=(Crumb(tenant.name, here), Crumb(title)),
        user_name=user.name or user.email,
        user_email=user.email,
    )


def operator_shell(user: User, title: str) -> Shell:
    """The frame of an operator's page."""
    here = reverse("operator-tenants")
    return Shell(
        title=f"{title} · Operator",
        heading="Millrace",
        detail="Operator",
        initials="MR",
        links=(Link("Tenants", here, "tenants", current=title == "Tenants"),),
        more=(Link("Raw admin", reverse("admin:index"), "admin"), _reference()),
        crumbs=(Crumb("Operator", here), Crumb(title)),
        user_name=user.name or user.email,
        user_email=user.email,
    )


def person_shell(user: User, title: str) -> Shell:
    """The frame of a page that belongs to no tenant yet."""
    return Shell(
        title=title,
        heading="Millrace",
        detail="Console",
        initials="MR",
        links=(Link("Tenants", reverse("home"), "tenants", current=True),),
        more=(_reference(),),
        crumbs=(Crumb(title),),
        user_name=user.name or user.email,
        user_email=user.email,
    )


def _all_tenants(user: User) -> Link:
    return Link("All tenants", reverse("operator-tenants" if user.is_staff else "home"), "tenants")


def _reference() -> Link:
    return Link("API reference", reverse("docs"), "reference")
