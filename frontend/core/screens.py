"""The screens of the console, which their packages declare.

A screen is a package of `frontend.tenant` or `frontend.operator`. Its module `views` has `urlpatterns` and `SCREEN`,
from which the URLs, the sidebar, the keyboard shortcuts and the command palette are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType
from typing import Literal

from django.urls import URLPattern

from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext
from tenants.permissions import Permission

TENANT, OPERATOR = "frontend.tenant", "frontend.operator"  # the packages of the screens
MAX_RESULTS_PER_KIND = 8  # in the command palette
SidebarGroup = Literal["top", "build", "billing", "infrastructure", "organization", "governance"]
# The headings of the sidebar in their order.
SIDEBAR_GROUPS: Mapping[SidebarGroup, str] = MappingProxyType(
    {
        "top": "",
        "build": _lazy("Build"),
        "billing": _lazy("Billing"),
        "infrastructure": _lazy("Infrastructure"),
        "organization": _lazy("Organization"),
        "governance": _lazy("Governance"),
    }
)


@dataclass(frozen=True)
class SearchResult:
    """One line of the command palette."""

    label: str
    url: str
    icon: str
    detail: str = ""
    letter: str = ""
    in_dialog: bool = False  # the page opens in a dialog


Finder = Callable[[PageContext, str], Iterable[SearchResult]]


@dataclass(frozen=True)
class PaletteAction:
    """An action that the command palette opens."""

    label: str
    route: str
    icon: str
    needs: Permission
    in_dialog: bool = False  # its form opens in a dialog, which focuses the first field


@dataclass(frozen=True)
class ConsoleScreen:
    """A screen. Other pages of it have its route as prefix: "invoices-detail"."""

    route: str  # the name of its URL
    label: str
    _: KW_ONLY
    icon: str = ""  # a symbol of icons.svg
    letter: str = ""  # pressed after `g`
    group: SidebarGroup | None = None  # None: only other screens link to it
    order: int = 0  # its position in the group
    needs: Permission | None = None  # the screen is hidden without this permission
    actions: tuple[PaletteAction, ...] = ()
    # What the command palette finds, by the heading of the results. Called inside `ctx.scope()` with the typed text.
    finders: Mapping[str, Finder] = field(default_factory=dict)


DJANGO_ADMIN = ConsoleScreen(
    "admin:index", _lazy("Django admin"), icon="admin", letter="x", group="governance", order=90
)


@cache
def _views_of_screens(package: str) -> tuple[ModuleType, ...]:
    """Return the `views` module of each screen of `frontend.tenant` or `frontend.operator`."""
    found = iter_modules(import_module(package).__path__, f"{package}.")
    return tuple(import_module(f"{module.name}.views") for module in found if module.ispkg)


def screen_urls() -> list[URLPattern]:
    """Return the URL patterns of all screens."""
    return [
        pattern
        for package in (TENANT, OPERATOR)
        for views in _views_of_screens(package)
        for pattern in views.urlpatterns
    ]


@cache
def sidebar_screens(package: str) -> tuple[ConsoleScreen, ...]:
    """Return the screens of the sidebar of tenants or operators, in its order."""
    groups = list(SIDEBAR_GROUPS)
    screens: list[ConsoleScreen] = [views.SCREEN for views in _views_of_screens(package)]
    if package == OPERATOR:
        screens.append(DJANGO_ADMIN)
    shown = [(groups.index(screen.group), screen.order, screen) for screen in screens if screen.group is not None]
    return tuple(screen for _, _, screen in sorted(shown, key=lambda row: row[:2]))
