"""The audit log of a page: filters, values before and after, and keyset pagination.

The open scope decides which entries are visible: those of one tenant or, for operators, of all tenants.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from billing.metering.usage import instant
from frontend.core.lists import ListPage, keyset_page, text_param
from frontend.core.page_context import PageContext, first_or_404
from tenants.models import AuditEntry, Tenant

PAGE_SIZE = 50
MAX_LISTED_CHANGES = 3  # changed fields per row of the list; the drawer shows all
NONE = "none"
MAX_VALUE_CHARACTERS = 80  # characters of a value in the list
_TEXTS = {"action": "action__istartswith", "actor": "actor__icontains", "object": "object_name__icontains"}


@dataclass(frozen=True)
class AuditChange:
    """The value of a field before and after. None: the field did not exist."""

    field: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class ListedEntry:
    """An entry with its tenant on operator pages. `changes` are shortened for the list."""

    row: AuditEntry
    tenant: Tenant | None
    tenant_name: str
    changes: tuple[AuditChange, ...]
    more: int


def filters(ctx: PageContext) -> dict[str, str]:
    """Return the values of the filter form. `tenant` is a slug and exists only on operator pages."""
    names = ("action", "actor", "object", "tenant", "from", "to")
    values = {name: ctx.query.get(name, "") for name in names}
    clear_url = ctx.request.path if any(values.values()) else ""
    return values | {"first": values["from"], "error": _time_lookups(ctx)[1], "clear_url": clear_url}


def entries(ctx: PageContext) -> ListPage:
    """Return a page of entries, newest first. Call inside `ctx.scope()`."""
    rows = _entries(ctx).filter(
        **{_TEXTS[n]: v for n in _TEXTS if (v := text_param(ctx, n, 200))}, **_time_lookups(ctx)[0]
    )
    slug = text_param(ctx, "tenant", 200)
    if ctx.access is None and slug:
        rows = rows.filter(tenant_id__in=Tenant.objects.all_tenants().filter(slug=slug).values("pk"))
    url = ctx.request.path.partition("panels/")[0]
    page = keyset_page(ctx, rows, url, PAGE_SIZE, filtered=bool(filters(ctx)["clear_url"]))
    names = _tenants(ctx, page.rows)
    return replace(page, rows=[_entry(ctx, row, names) for row in page.rows])


def detail(ctx: PageContext, pk: int) -> dict[str, Any]:
    """Return one entry with all changes. Call inside `ctx.scope()`."""
    row = first_or_404(_entries(ctx).filter(pk=pk))
    return {"entry": _entry(ctx, row, _tenants(ctx, [row])), "row": row, "changes": _changes(row)}


def _entries(ctx: PageContext) -> QuerySet[AuditEntry]:
    found: QuerySet[AuditEntry] = (
        AuditEntry.objects.all_tenants() if ctx.access is None else AuditEntry.objects.for_tenant(ctx.tenant)
    )
    return found


def _tenants(ctx: PageContext, rows: Sequence[AuditEntry]) -> Mapping[int, Tenant]:
    if ctx.access is not None:
        return {}
    return Tenant.objects.all_tenants().in_bulk({row.tenant_id for row in rows if row.tenant_id is not None})


def _entry(ctx: PageContext, row: AuditEntry, tenants: Mapping[int, Tenant]) -> ListedEntry:
    changes = _changes(row)
    if row.before is None:  # omit unset fields of a new object
        changes = tuple(change for change in changes if change.after != NONE)
    tenant = tenants.get(row.tenant_id or 0)
    gone = f"tenant {row.tenant_id}" if row.tenant_id is not None and ctx.access is None else ""
    listed = tuple(AuditChange(c.field, _short(c.before), _short(c.after)) for c in changes[:MAX_LISTED_CHANGES])
    name = gone if tenant is None else tenant.name
    return ListedEntry(row, tenant, name, listed, max(0, len(changes) - MAX_LISTED_CHANGES))


def _changes(row: AuditEntry) -> tuple[AuditChange, ...]:
    before, after = row.before or {}, row.after or {}
    names = sorted({*before, *after})
    return tuple(AuditChange(name, _value_text(before, name), _value_text(after, name)) for name in names)


def _value_text(values: Mapping[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    value = values[name]
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
                return {}, "Enter dates as YYYY-MM-DD."
    return found, ""
