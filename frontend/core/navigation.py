"""Navigation: the entries of the sidebar, of the command palette and of `g` + letter.

An entry is shown if the user's role has the permission. The Django admin is shown if its URLs exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.urls import NoReverseMatch

from frontend.core.languages import lazy_text as _lazy
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
            NavigationEntry(_lazy("Overview"), "overview", "overview", "o"),
            NavigationEntry(_lazy("Usage"), "usage", "usage", "u", Permission.USAGE_READ),
            NavigationEntry(_lazy("Playground"), "playground", "playground", "p", Permission.KEYS_WRITE),
        ),
    ),
    NavigationGroup(
        _lazy("Build"),
        (
            NavigationEntry(_lazy("API keys"), "keys", "keys", "k", Permission.KEYS_READ),
            NavigationEntry(_lazy("Projects"), "projects", "layers", "t", Permission.PROJECTS_READ),
            NavigationEntry(_lazy("Models"), "models", "models", "d"),
            NavigationEntry(_lazy("Routing policy"), "routing", "routing", "r", Permission.POLICIES_READ),
            NavigationEntry(_lazy("Experiments"), "experiments", "percent", "e", Permission.POLICIES_READ),
            NavigationEntry(_lazy("Requests"), "requests", "requests", "q", Permission.USAGE_READ),
            NavigationEntry(_lazy("Batches"), "batches", "runs", "j", Permission.USAGE_READ),
        ),
    ),
    NavigationGroup(
        _lazy("Billing"),
        (
            NavigationEntry(_lazy("Budgets and quotas"), "budgets", "budgets", "b", Permission.LIMITS_READ),
            NavigationEntry(_lazy("Alerts"), "alerts", "alerts", "l", Permission.LIMITS_READ),
            NavigationEntry(_lazy("Invoices"), "invoices", "invoices", "i", Permission.BILLING_READ),
            NavigationEntry(_lazy("Prices"), "prices", "prices", "c"),
        ),
    ),
    NavigationGroup(
        _lazy("Organization"),
        (
            NavigationEntry(_lazy("Members"), "members", "members", "m", Permission.MEMBERS_READ),
            NavigationEntry(_lazy("Webhooks"), "webhooks", "webhooks", "w", Permission.WEBHOOKS_READ),
            NavigationEntry(_lazy("Audit log"), "audit", "audit", "a", Permission.AUDIT_READ),
            NavigationEntry(_lazy("Settings"), "settings", "settings", "s"),
        ),
    ),
)
OPERATOR = (
    NavigationGroup(
        "",
        (
            NavigationEntry(_lazy("Health"), "operator-health", "health", "h"),
            NavigationEntry(_lazy("Tenants"), "operator-tenants", "tenants", "t"),
            NavigationEntry(_lazy("Users"), "operator-users", "members", "u"),
        ),
    ),
    NavigationGroup(
        _lazy("Billing"),
        (
            NavigationEntry(_lazy("Billing runs"), "operator-billing", "runs", "b"),
            NavigationEntry(_lazy("Price book"), "operator-prices", "prices", "p"),
            NavigationEntry(_lazy("Margin"), "operator-margin", "usage", "g"),
        ),
    ),
    NavigationGroup(
        _lazy("Infrastructure"),
        (
            NavigationEntry(_lazy("Deployments"), "operator-deployments", "layers", "d"),
            NavigationEntry(_lazy("Models and workers"), "operator-models", "models", "m"),
            NavigationEntry(_lazy("Fleet"), "operator-fleet", "fleet", "f"),
        ),
    ),
    NavigationGroup(
        _lazy("Governance"),
        (
            NavigationEntry(_lazy("Alerts"), "operator-alerts", "alerts", "l"),
            NavigationEntry(_lazy("Audit log"), "operator-audit", "audit", "a"),
            NavigationEntry(_lazy("Django admin"), "admin:index", "admin", "x"),
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
