"""The audit log of a page: filters, values before and after, and keyset pagination.

The open scope selects the entries: those of one tenant or, for operators, of all tenants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from billing.metering.usage import instant
from frontend.core.audit_words import (
    NONE,
    OBJECTS,
    Names,
    action_label,
    currencies_of,
    field_label,
    names_of,
    units_of,
    value_text,
)
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar, text_chip
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import ListPage, keyset_page, text_param
from frontend.core.numbers import shown_currency
from frontend.core.page_context import PageContext, first_or_404
from tenants.models import AuditEntry, Tenant

PAGE_SIZE = 50
MAX_LISTED_CHANGES = 3  # changed fields per row of the list; the drawer shows all
MAX_VALUE_CHARACTERS = 80  # characters of a value in the list
_TEXTS = {"action": "action__istartswith", "actor": "actor__icontains", "object": "object_name__icontains"}


EXPORTED_COLUMNS = (
    *("time", "actor", "ip_address", "action", "resource", "resource_type", "resource_id", "tenant_id"),
    *("changes", "request_id"),
)


@dataclass(frozen=True)
class AuditChange:
    """The value of a field before and after, in words. None: the field did not exist."""

    field: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class ListedEntry:
    """An entry with its tenant on operator pages. `changes` are shortened for the list."""

    row: AuditEntry
    label: str  # the action in words
    tenant: Tenant | None
    tenant_name: str
    changes: tuple[AuditChange, ...]
    more: int


class _Words(NamedTuple):
    """The words of the values in entries: names of objects, units of budgets and currencies of tenants, by ID."""

    names: Names
    units: Mapping[int, str]
    currencies: Mapping[int, str]


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips. `tenant` is a slug and exists only on operator pages."""
    url, action = _url(ctx), text_param(ctx, "action", 200)
    kinds = ((f"{kind}.", label) for kind, label in sorted(OBJECTS.items(), key=lambda item: item[1]))
    chips = [
        choice_chip(ctx, url, "action", _("Resource type"), kinds, action or None),
        text_chip(ctx, url, "actor", _("Actor"), most=200),
        text_chip(ctx, url, "object", _("Resource"), most=200),
        text_chip(ctx, url, "from", _("From"), "2026-01-31"),
        text_chip(ctx, url, "to", _("To"), "2026-01-31"),
    ]
    if ctx.access is None:
        chips.insert(0, text_chip(ctx, url, "tenant", _("Tenant"), "slug", most=200))
    return filter_bar(ctx, url, chips)


def page_context(ctx: PageContext) -> dict[str, Any]:
    """Return the context of the page around the panel. Call inside `ctx.scope()`."""
    return {"filters": filters(ctx), "error": _time_lookups(ctx)[1], **tools_of(ctx).page(ctx)}


def entries(ctx: PageContext) -> ListPage:
    """Return a page of entries, newest first. Call inside `ctx.scope()`."""
    page = keyset_page(ctx, _select_entries(ctx), _url(ctx), PAGE_SIZE, filtered=filters(ctx).is_filtered)
    return replace(page, rows=list_entries(ctx, page.rows), **tools_of(ctx).table(ctx))


def export_rows(ctx: PageContext) -> list[tuple[Any, ...]]:
    """Return the newest entries with the page's filters, as EXPORTED_COLUMNS. Call inside `ctx.scope()`."""
    rows = list(_select_entries(ctx).order_by("-pk")[:MAX_EXPORTED])
    words = _words(ctx, rows)
    return [_format_row(row, _changes(row, words)) for row in rows]


_COLUMNS = {
    "time": _lazy("Time"),
    "actor": _lazy("Actor"),
    "changed": _lazy("Changed"),
    "ip": _lazy("IP address"),
    "request": _lazy("Request ID"),
}
_DEFAULT = ("time", "actor", "changed")
TOOLS = ListTools(
    "audit",
    exported=EXPORTED_COLUMNS,
    rows=export_rows,
    columns=_COLUMNS,
    views=(
        (_lazy("All"), {}),
        (_lazy("API keys"), {"action": "key."}),
        (_lazy("Budgets"), {"action": "budget."}),
        (_lazy("Members"), {"action": "member."}),
    ),
    default=_DEFAULT,
)
OPERATOR_TOOLS = ListTools(
    "operator-audit",
    exported=EXPORTED_COLUMNS,
    rows=export_rows,
    columns={"time": _lazy("Time"), "actor": _lazy("Actor"), "tenant": _lazy("Tenant"), **_COLUMNS},
    default=("time", "actor", "tenant", "changed"),
)


def tools_of(ctx: PageContext) -> ListTools:
    return OPERATOR_TOOLS if ctx.access is None else TOOLS


def _format_row(row: AuditEntry, changes: Sequence[AuditChange]) -> tuple[Any, ...]:
    texts = (f"{change.field}: {change.before or '–'} → {change.after or '–'}" for change in changes)
    return (
        *(row.created_at.isoformat(), row.actor, row.ip_address, row.action, row.object_name, row.object_type),
        *(row.object_id, row.tenant_id, "; ".join(texts), row.request_id),
    )


def _url(ctx: PageContext) -> str:
    return ctx.request.path.partition("panels/")[0]


def _select_entries(ctx: PageContext) -> QuerySet[AuditEntry]:
    rows = _entries(ctx).filter(
        **{_TEXTS[n]: v for n in _TEXTS if (v := text_param(ctx, n, 200))}, **_time_lookups(ctx)[0]
    )
    slug = text_param(ctx, "tenant", 200)
    if ctx.access is None and slug:
        rows = rows.filter(tenant_id__in=Tenant.objects.all_tenants().filter(slug=slug).values("pk"))
    return rows


def list_entries(ctx: PageContext, rows: Sequence[AuditEntry]) -> list[ListedEntry]:
    """Return entries in words."""
    tenants, words = _tenants(ctx, rows), _words(ctx, rows)
    return [_entry(ctx, row, tenants, _changes(row, words)) for row in rows]


def detail(ctx: PageContext, pk: int) -> dict[str, Any]:
    """Return one entry with all changes. Call inside `ctx.scope()`."""
    row = first_or_404(_entries(ctx).filter(pk=pk))
    (entry,) = list_entries(ctx, [row])
    changes = _changes(row, _words(ctx, [row]))
    return {"entry": entry, "row": row, "changes": changes}


def _entries(ctx: PageContext) -> QuerySet[AuditEntry]:
    found: QuerySet[AuditEntry] = (
        AuditEntry.objects.all_tenants() if ctx.access is None else AuditEntry.objects.for_tenant(ctx.tenant)
    )
    return found


def _tenants(ctx: PageContext, rows: Sequence[AuditEntry]) -> Mapping[int, Tenant]:
    if ctx.access is not None:
        return {}
    return Tenant.objects.all_tenants().in_bulk({row.tenant_id for row in rows if row.tenant_id is not None})


def _entry(
    ctx: PageContext, row: AuditEntry, tenants: Mapping[int, Tenant], changes: Sequence[AuditChange]
) -> ListedEntry:
    if row.before is None:  # omit unset fields of a new object
        changes = tuple(change for change in changes if change.after != NONE)
    tenant = tenants.get(row.tenant_id or 0)
    gone = (
        _("tenant %(tenant_id)s") % {"tenant_id": row.tenant_id}
        if row.tenant_id is not None and ctx.access is None
        else ""
    )
    shown = tuple(AuditChange(c.field, _short(c.before), _short(c.after)) for c in changes[:MAX_LISTED_CHANGES])
    name = gone if tenant is None else tenant.name
    return ListedEntry(row, action_label(row.action), tenant, name, shown, max(0, len(changes) - MAX_LISTED_CHANGES))


def _words(ctx: PageContext, rows: Sequence[AuditEntry]) -> _Words:
    return _Words(names_of(ctx, rows), units_of(ctx, rows), currencies_of(ctx, rows))


def _changes(row: AuditEntry, words: _Words) -> tuple[AuditChange, ...]:
    before, after = row.before or {}, row.after or {}
    unit = str(after.get("unit") or before.get("unit") or words.units.get(row.object_id or 0, ""))
    currency = words.currencies.get(row.tenant_id or 0)

    def text(values: Mapping[str, Any], name: str) -> str | None:
        return value_text(name, values[name], words.names, unit) if name in values else None

    fields = sorted({*before, *after})
    with shown_currency(partial(str, currency)) if currency else nullcontext():
        return tuple(AuditChange(field_label(name), text(before, name), text(after, name)) for name in fields)


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 1]}…"


def _time_lookups(ctx: PageContext) -> tuple[dict[str, datetime], str]:
    """Return the ORM lookups of the date filters, in UTC, and an error message."""
    found: dict[str, datetime] = {}
    for name, lookup, more in (("from", "created_at__gte", timedelta()), ("to", "created_at__lt", timedelta(days=1))):
        if text := ctx.query.get(name, ""):
            try:
                found[lookup] = instant(text).astimezone(UTC) + more
            except ValueError:
                return {}, _("Enter dates as YYYY-MM-DD.")
    return found, ""
