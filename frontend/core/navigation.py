"""Where one can go: the sidebar's entries, which are also the palette's first and the targets of `g` + letter.

An entry shows as soon as an address of its name exists, to those whose role may see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.urls import NoReverseMatch

from frontend.core.page_context import Visit
from tenants.permissions import Permission


@dataclass(frozen=True)
class Entry:
    """A screen in the sidebar. `letter` follows `g`; `icon` names a symbol of icons.svg."""

    label: str
    route: str
    icon: str
    letter: str
    needs: Permission | None = None


@dataclass(frozen=True)
class Group:
    label: str
    entries: tuple[Entry, ...]


TENANT = (
    Group(
        "",
        (
            Entry("Overview", "overview", "overview", "o"),
            Entry("Usage", "usage", "usage", "u", Permission.USAGE_READ),
            Entry("Playground", "playground", "playground", "p", Permission.KEYS_WRITE),
        ),
    ),
    Group(
        "Build",
        (
            Entry("API keys", "keys", "keys", "k", Permission.KEYS_READ),
            Entry("Models", "models", "models", "d"),
            Entry("Routing policy", "routing", "routing", "r", Permission.POLICIES_READ),
            Entry("Requests", "requests", "requests", "q", Permission.USAGE_READ),
        ),
    ),
    Group(
        "Billing",
        (
            Entry("Budgets and quotas", "budgets", "budgets", "b", Permission.LIMITS_READ),
            Entry("Invoices", "invoices", "invoices", "i", Permission.BILLING_READ),
            Entry("Prices", "prices", "prices", "c"),
        ),
    ),
    Group(
        "Organisation",
        (
            Entry("Members", "members", "members", "m", Permission.MEMBERS_READ),
            Entry("Webhooks", "webhooks", "webhooks", "w", Permission.WEBHOOKS_READ),
            Entry("Audit log", "audit", "audit", "a", Permission.AUDIT_READ),
            Entry("Settings", "settings", "settings", "s"),
        ),
    ),
)
OPERATOR = (
    Group(
        "",
        (
            Entry("Health", "ops-health", "health", "h"),
            Entry("Tenants", "ops-tenants", "tenants", "t"),
            Entry("Users", "ops-users", "members", "u"),
        ),
    ),
    Group(
        "Money",
        (
            Entry("Billing runs", "ops-billing", "runs", "b"),
            Entry("Price book", "ops-prices", "prices", "p"),
        ),
    ),
    Group(
        "Machines",
        (
            Entry("Models and workers", "ops-models", "models", "m"),
            Entry("Fleet", "ops-fleet", "fleet", "f"),
            Entry("Capacity", "ops-capacity", "capacity", "c"),
        ),
    ),
    Group(
        "Control",
        (
            Entry("Alerts", "ops-alerts", "alerts", "l"),
            Entry("Audit log", "ops-audit", "audit", "a"),
            Entry("Django admin", "admin:index", "admin", "x"),
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
    """A group with the entries that are there for this person."""

    label: str
    links: tuple[Link, ...]


def sections(visit: Visit) -> tuple[Section, ...]:
    """The sidebar of this visit."""
    groups = OPERATOR if visit.access is None else TENANT
    found = (Section(group.label, tuple(_links(visit, group))) for group in groups)
    return tuple(section for section in found if section.links)


def _links(visit: Visit, group: Group) -> Iterator[Link]:
    here = visit.request.resolver_match
    name = here.view_name if here else ""
    for entry in group.entries:
        if not visit.may(entry.needs):
            continue
        try:
            url = visit.url(entry.route)
        except NoReverseMatch:
            continue
        # A screen's further pages are named after it: "invoices", "invoices-one".
        current = name == entry.route or name.startswith(f"{entry.route}-")
        yield Link(entry.label, url, entry.icon, entry.letter, current)
