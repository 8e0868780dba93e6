"""Navigation: the entries of the sidebar, of the command palette and of `g` + letter.

An entry is shown if the user's role has the permission. The Django admin is shown if its URLs exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.urls import NoReverseMatch

from frontend.core.page_context import PageContext
from tenants.permissions import Permission


@dataclass(frozen=True)
class NavigationEntry:
    """A screen in the sidebar. `letter` is pressed after `g`; `icon` is a symbol of icons.svg."""

    label: str
    route: str
    icon: str
    letter: str
    needs: Permission | None = None


@dataclass(frozen=True)
class NavigationGroup:
    label: str
    entries: tuple[NavigationEntry, ...]


TENANT = (
    NavigationGroup(
        "",
        (
            NavigationEntry("Overview", "overview", "overview", "o"),
            NavigationEntry("Usage", "usage", "usage", "u", Permission.USAGE_READ),
            NavigationEntry("Playground", "playground", "playground", "p", Permission.KEYS_WRITE),
        ),
    ),
    NavigationGroup(
        "Build",
        (
            NavigationEntry("API keys", "keys", "keys", "k", Permission.KEYS_READ),
            NavigationEntry("Projects", "projects", "layers", "t", Permission.PROJECTS_READ),
            NavigationEntry("Models", "models", "models", "d"),
            NavigationEntry("Routing policy", "routing", "routing", "r", Permission.POLICIES_READ),
            NavigationEntry("Experiments", "experiments", "percent", "e", Permission.POLICIES_READ),
            NavigationEntry("Requests", "requests", "requests", "q", Permission.USAGE_READ),
            NavigationEntry("Batches", "batches", "runs", "j", Permission.USAGE_READ),
        ),
    ),
    NavigationGroup(
        "Billing",
        (
            NavigationEntry("Budgets and quotas", "budgets", "budgets", "b", Permission.LIMITS_READ),
            NavigationEntry("Alerts", "alerts", "alerts", "l", Permission.LIMITS_READ),
            NavigationEntry("Invoices", "invoices", "invoices", "i", Permission.BILLING_READ),
            NavigationEntry("Prices", "prices", "prices", "c"),
        ),
    ),
    NavigationGroup(
        "Organization",
        (
            NavigationEntry("Members", "members", "members", "m", Permission.MEMBERS_READ),
            NavigationEntry("Webhooks", "webhooks", "webhooks", "w", Permission.WEBHOOKS_READ),
            NavigationEntry("Audit log", "audit", "audit", "a", Permission.AUDIT_READ),
            NavigationEntry("Settings", "settings", "settings", "s"),
        ),
    ),
)
OPERATOR = (
    NavigationGroup(
        "",
        (
            NavigationEntry("Health", "operator-health", "health", "h"),
            NavigationEntry("Tenants", "operator-tenants", "tenants", "t"),
            NavigationEntry("Users", "operator-users", "members", "u"),
        ),
    ),
    NavigationGroup(
        "Billing",
        (
            NavigationEntry("Billing runs", "operator-billing", "runs", "b"),
            NavigationEntry("Price book", "operator-prices", "prices", "p"),
            NavigationEntry("Margin", "operator-margin", "usage", "g"),
        ),
    ),
    NavigationGroup(
        "Infrastructure",
        (
            NavigationEntry("Deployments", "operator-deployments", "layers", "d"),
            NavigationEntry("Models and workers", "operator-models", "models", "m"),
            NavigationEntry("Fleet", "operator-fleet", "fleet", "f"),
        ),
    ),
    NavigationGroup(
        "Governance",
        (
            NavigationEntry("Alerts", "operator-alerts", "alerts", "l"),
            NavigationEntry("Audit log", "operator-audit", "audit", "a"),
            NavigationEntry("Django admin", "admin:index", "admin", "x"),
        ),
    ),
)


@dataclass(frozen=True)
class Link:
    label: str
    url: str
    icon: str
    letter: str = ""
    current: bool = False


@dataclass(frozen=True)
class Section:
    """A group with the entries that the user can see."""

    label: str
    links: tuple[Link, ...]


def sections(ctx: PageContext) -> tuple[Section, ...]:
    """Return the sidebar of this page."""
    groups = OPERATOR if ctx.access is None else TENANT
    found = (Section(group.label, tuple(_links(ctx, group))) for group in groups)
    return tuple(section for section in found if section.links)


def _links(ctx: PageContext, group: NavigationGroup) -> Iterator[Link]:
    here = ctx.request.resolver_match
    name = here.view_name if here else ""
    for entry in group.entries:
        if not ctx.may(entry.needs):
            continue
        try:
            url = ctx.url(entry.route)
        except NoReverseMatch:
            continue
        # Further pages of a screen have its name as prefix: "invoices-detail".
        current = name == entry.route or name.startswith(f"{entry.route}-")
        yield Link(entry.label, url, entry.icon, entry.letter, current)
