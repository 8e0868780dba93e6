"""The audit log of a page: filters, values before and after, and keyset pagination.

The open scope decides which entries are visible: those of one tenant or, for operators, of all tenants.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.db.models import QuerySet

from billing.metering.usage import instant
from frontend.core.page_context import PageContext
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
class AuditLogRow:
    id: int
    at: datetime
    action: str
    actor: str
    tenant: str  # empty without a tenant, and on a tenant's page
    tenant_url: str
    kind: str
    name: str
    changes: tuple[AuditChange, ...]
    more: int
    url: str


@dataclass(frozen=True)
class AuditFilters:
    """Values of the filter form. `tenant` is a slug and exists only on operator pages."""

    action: str
    actor: str
    object: str
    tenant: str
    first: str
    last: str
    error: str
    clear_url: str


@dataclass(frozen=True)
class AuditLogPanel:
    rows: tuple[AuditLogRow, ...]
    newer_url: str
    older_url: str
    filtered: bool


@dataclass(frozen=True)
class AuditEntryDetail:
    entry: AuditLogRow
    changes: tuple[AuditChange, ...]
    address: str
    request_id: str
    object_id: int | None


def filters(ctx: PageContext) -> AuditFilters:
    """Return the filters of the query string."""
    query = ctx.query
    _, error = _time_lookups(ctx)
    names = ("action", "actor", "object", "tenant", "from", "to")
    filtered = any(query.get(name) for name in names)
    return AuditFilters(
        action=query.get("action", ""),
        actor=query.get("actor", ""),
        object=query.get("object", ""),
        tenant=query.get("tenant", ""),
        first=query.get("from", ""),
        last=query.get("to", ""),
        error=error,
        clear_url=ctx.request.path if filtered else "",
    )


def entries(ctx: PageContext, url_name: str) -> AuditLogPanel:
    """Return a page of entries, newest first. `url_name` is the URL name of one entry. Call inside `ctx.scope()`."""
    rows = _entries(ctx).filter(**{_TEXTS[n]: v for n in _TEXTS if (v := _text_param(ctx, n))}, **_time_lookups(ctx)[0])
    slug = _text_param(ctx, "tenant")
    if ctx.access is None and slug:
        rows = rows.filter(tenant_id__in=Tenant.objects.all_tenants().filter(slug=slug).values("pk"))
    before, after = _int_param(ctx, "before"), _int_param(ctx, "after")
    if after is not None:  # the previous page
        found = list(rows.filter(pk__gt=after).order_by("pk")[: PAGE_SIZE + 1])
        older, newer, found = True, len(found) > PAGE_SIZE, found[:PAGE_SIZE][::-1]
    else:
        found = list((rows.filter(pk__lt=before) if before is not None else rows).order_by("-pk")[: PAGE_SIZE + 1])
        older, newer, found = len(found) > PAGE_SIZE, before is not None, found[:PAGE_SIZE]
    names = _tenants(ctx, found)
    return AuditLogPanel(
        rows=tuple(_entry(ctx, row, names, url_name) for row in found),
        newer_url=_page_url(ctx, after=found[0].pk) if newer and found else _page_url(ctx) if newer else "",
        older_url=_page_url(ctx, before=found[-1].pk) if older and found else "",
        filtered=bool(filters(ctx).clear_url),
    )


def detail(ctx: PageContext, pk: int, url_name: str) -> AuditEntryDetail | None:
    """Return one entry with all changes; None if the scope does not contain it. Call inside `ctx.scope()`."""
    row = _entries(ctx).filter(pk=pk).first()
    if row is None:
        return None
    entry = _entry(ctx, row, _tenants(ctx, [row]), url_name)
    return AuditEntryDetail(entry, _changes(row), row.ip_address or "", row.request_id, row.object_id)


def _entries(ctx: PageContext) -> QuerySet[AuditEntry]:
    found: QuerySet[AuditEntry] = (
        AuditEntry.objects.all_tenants() if ctx.access is None else AuditEntry.objects.for_tenant(ctx.tenant)
    )
    return found


def _tenants(ctx: PageContext, rows: list[AuditEntry]) -> Mapping[int, Tenant]:
    if ctx.access is not None:
        return {}
    return Tenant.objects.all_tenants().in_bulk({row.tenant_id for row in rows if row.tenant_id is not None})


def _entry(ctx: PageContext, row: AuditEntry, tenants: Mapping[int, Tenant], url_name: str) -> AuditLogRow:
    changes = _changes(row)
    if row.before is None:  # omit unset fields of a new object
        changes = tuple(change for change in changes if change.after != NONE)
    tenant = tenants.get(row.tenant_id or 0)
    gone = f"tenant {row.tenant_id}" if row.tenant_id is not None and ctx.access is None else ""
    return AuditLogRow(
        id=row.pk,
        at=row.created_at,
        action=row.action,
        actor=row.actor,
        tenant=gone if tenant is None else tenant.name,
        tenant_url="" if tenant is None else f"?{urlencode({'tenant': tenant.slug})}",
        kind=row.object_type,
        name=row.object_name,
        changes=tuple(AuditChange(c.field, _short(c.before), _short(c.after)) for c in changes[:MAX_LISTED_CHANGES]),
        more=max(0, len(changes) - MAX_LISTED_CHANGES),
        url=ctx.url(url_name, row.pk),
    )


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


def _text_param(ctx: PageContext, name: str) -> str:
    return ctx.query.get(name, "").strip()[:200].replace("\0", "")


def _int_param(ctx: PageContext, name: str) -> int | None:
    text = ctx.query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


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


def _page_url(ctx: PageContext, **cursor: int) -> str:
    params = {name: value for name, value in ctx.query.items() if name not in ("before", "after")}
    return f"{ctx.request.path.partition('panels/')[0]}?{urlencode(params | cursor)}"
