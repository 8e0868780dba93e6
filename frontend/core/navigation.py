"""Navigation: the links of the sidebar, of the command palette and of `g` + letter.

A screen is shown if the user's role has the permission. The Django admin is shown if its URLs exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from django.urls import NoReverseMatch

from frontend.core.page_context import PageContext
from frontend.core.screens import OPERATOR, SIDEBAR_GROUPS, TENANT, ConsoleScreen, sidebar_screens


@dataclass(frozen=True)
class Link:
    label: str
    url: str
    icon: str
    letter: str = ""
    current: bool = False


@dataclass(frozen=True)
class Section:
    """A group with the screens that the user can see."""

    label: str
    links: tuple[Link, ...]


def screens_of(ctx: PageContext) -> tuple[ConsoleScreen, ...]:
    """Return the screens of the sidebar, also those that the user cannot see."""
    return sidebar_screens(OPERATOR if ctx.access is None else TENANT)


def sections(ctx: PageContext) -> tuple[Section, ...]:
    """Return the sidebar of this page."""
    found = [
        Section(SIDEBAR_GROUPS[group], tuple(_links(ctx, screens)))
        for group, screens in groupby(screens_of(ctx), lambda screen: screen.group)
        if group is not None
    ]
    return tuple(section for section in found if section.links)


def screen_of(ctx: PageContext) -> ConsoleScreen | None:
    """Return the screen of the sidebar that the page belongs to, also one that the user cannot see."""
    here = ctx.request.resolver_match
    name = here.view_name if here else ""
    found = [screen for screen in screens_of(ctx) if _is_page_of(name, screen)]
    return max(found, key=lambda screen: len(screen.route), default=None)


def _is_page_of(name: str, screen: ConsoleScreen) -> bool:
    """Return whether a URL is that of a screen. Further pages have its name as prefix: "invoices-detail"."""
    return name == screen.route or name.startswith(f"{screen.route}-")


def _links(ctx: PageContext, screens: Iterator[ConsoleScreen]) -> Iterator[Link]:
    here = ctx.request.resolver_match
    name = here.view_name if here else ""
    for screen in screens:
        if not ctx.may(screen.needs):
            continue
        try:
            url = ctx.url(screen.route)
        except NoReverseMatch:
            continue
        yield Link(screen.label, url, screen.icon, screen.letter, _is_page_of(name, screen))
