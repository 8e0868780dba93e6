"""Parts of list pages: parameters of the query string, links that change them, choices, and pages of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.db.models import QuerySet

from frontend.core.page_context import PageContext
from tenants.models import ApiKey, User

MAX_CHOICES = 500
CURSORS = ("before", "after", "cursor", "page", "request")  # places in a list and the open drawer; links drop them


@dataclass(frozen=True)
class Choice:
    """A link that changes one parameter of the page."""

    label: str
    url: str
    current: bool


@dataclass(frozen=True)
class ListPage:
    """A page of a list. A URL is empty if there is no such page. `places`: the decimals of its column of money.

    `columns` and `headings` are the names and labels of the columns that the user shows.
    """

    rows: Sequence[Any]
    newer_url: str = ""
    older_url: str = ""
    newest_url: str = ""
    filtered: bool = False
    places: int = 2
    columns: Sequence[str] = ()
    headings: Sequence[str] = ()


def text_param(ctx: PageContext, name: str, most: int = 100) -> str:
    """Return the start of a parameter."""
    return ctx.query.get(name, "").strip()[:most]


def number_param(ctx: PageContext, name: str) -> int | None:
    """Return a parameter as a row's ID; None if it is not a number."""
    text = ctx.query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def with_query(url: str, **params: Any) -> str:
    """Return the URL with these parameters. Empty ones are left out."""
    query = urlencode({name: value for name, value in params.items() if value not in ("", None)})
    return f"{url}?{query}" if query else url


def changed_url(ctx: PageContext, url: str, **changes: Any) -> str:
    """Return the URL with the page's parameters and these changes. The position in the list is not kept."""
    return with_query(url, **{name: value for name, value in ctx.query.items() if name not in CURSORS} | changes)


def named_rows(rows: QuerySet[Any]) -> Iterable[tuple[Any, str]]:
    """Return the IDs and names of rows, for the choices of a filter."""
    return rows.order_by("name", "pk").values_list("pk", "name")[:MAX_CHOICES]


def key_creators(ctx: PageContext) -> Iterable[tuple[int, str]]:
    """Return the IDs and names of the members who created API keys, for the choices of a filter."""
    creators = ApiKey.objects.for_tenant(ctx.tenant).filter(created_by__isnull=False).values("created_by")
    users = User.objects.filter(pk__in=creators).order_by("name", "email")
    return [(pk, name or email) for pk, name, email in users.values_list("pk", "name", "email")[:MAX_CHOICES]]


def keyset_page(ctx: PageContext, rows: QuerySet[Any], url: str, size: int, *, filtered: bool = False) -> ListPage:
    """Return the page that `before` or `after` selects, newest first. `url` is that of the screen."""
    before, after = number_param(ctx, "before"), number_param(ctx, "after")
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("pk")[: size + 1])
        older, newer, found = True, len(found) > size, found[:size][::-1]
    else:
        found = list((rows if before is None else rows.filter(pk__lt=before)).order_by("-pk")[: size + 1])
        older, newer, found = len(found) > size, before is not None, found[:size]
    return ListPage(
        found,
        newer_url=changed_url(ctx, url, after=found[0].pk if found else "") if newer else "",
        older_url=changed_url(ctx, url, before=found[-1].pk) if older and found else "",
        newest_url=changed_url(ctx, url) if before is not None or after is not None else "",
        filtered=filtered,
    )
