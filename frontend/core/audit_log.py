"""The audit log as a page shows it: filters in the address, before and after, pages by key.

It reads whatever the open scope shows: one tenant's entries, or everybody's for operators.
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

SIZE = 50
SHOWN = 3  # changed fields in the list; the drawer has them all
NONE = "none"
MAX_VALUE_CHARACTERS = 80  # characters of a value in the list
_TEXTS = {"action": "action__istartswith", "actor": "actor__icontains", "object": "object_name__icontains"}


@dataclass(frozen=True)
class AuditChange:
    """One field. None: it was not there before, or is not after."""

    field: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class AuditLogRow:
    id: int
    at: datetime
    action: str
    actor: str
    tenant: str  # empty: it concerns none, or the page is one tenant's
    tenant_url: str
    kind: str
    name: str
    changes: tuple[AuditChange, ...]
    more: int
    url: str


@dataclass(frozen=True)
class AuditFilters:
    """What the filters' form shows. `tenant`: a slug, on operators' pages alone."""

    action: str
    actor: str
    object: str
    tenant: str
    first: str
    last: str
    fault: str
    clear_url: str


@dataclass(frozen=True)
class AuditLogPanel:
    rows: tuple[AuditLogRow, ...]
    newer_url: str
    older_url: str
    filtered: bool


@dataclass(frozen=True)
class Detail:
    entry: AuditLogRow
    changes: tuple[AuditChange, ...]
    address: str
    request_id: str
    object_id: int | None


def fields(visit: PageContext) -> AuditFilters:
    """Return the filters as they were asked for."""
    query = visit.query
    _, fault = _times(visit)
    names = ("action", "actor", "object", "tenant", "from", "to")
    filtered = any(query.get(name) for name in names)
    return AuditFilters(
        action=query.get("action", ""),
        actor=query.get("actor", ""),
        object=query.get("object", ""),
        tenant=query.get("tenant", ""),
        first=query.get("from", ""),
        last=query.get("to", ""),
        fault=fault,
        clear_url=visit.request.path if filtered else "",
    )


def log(visit: PageContext, one: str) -> AuditLogPanel:
    """Return a page of entries, newest first; `one` names the address of a single entry. In the visit's scope."""
    rows = _entries(visit).filter(**{_TEXTS[n]: v for n in _TEXTS if (v := _text(visit, n))}, **_times(visit)[0])
    slug = _text(visit, "tenant")
    if visit.access is None and slug:
        rows = rows.filter(tenant_id__in=Tenant.objects.all_tenants().filter(slug=slug).values("pk"))
    before, after = _number(visit, "before"), _number(visit, "after")
    if after is not None:  # the page before: the nearest newer ones, from the oldest of them on
        found = list(rows.filter(pk__gt=after).order_by("pk")[: SIZE + 1])
        older, newer, found = True, len(found) > SIZE, found[:SIZE][::-1]
    else:
        found = list((rows.filter(pk__lt=before) if before is not None else rows).order_by("-pk")[: SIZE + 1])
        older, newer, found = len(found) > SIZE, before is not None, found[:SIZE]
    names = _tenants(visit, found)
    return AuditLogPanel(
        rows=tuple(_entry(visit, row, names, one) for row in found),
        newer_url=_page(visit, after=found[0].pk) if newer and found else _page(visit) if newer else "",
        older_url=_page(visit, before=found[-1].pk) if older and found else "",
        filtered=bool(fields(visit).clear_url),
    )


def detail(visit: PageContext, pk: int, one: str) -> Detail | None:
    """All of one entry; None: the scope shows no such. In the visit's scope."""
    row = _entries(visit).filter(pk=pk).first()
    if row is None:
        return None
    entry = _entry(visit, row, _tenants(visit, [row]), one)
    return Detail(entry, _changes(row), row.ip_address or "", row.request_id, row.object_id)


def _entries(visit: PageContext) -> QuerySet[AuditEntry]:
    found: QuerySet[AuditEntry] = (
        AuditEntry.objects.all_tenants() if visit.access is None else AuditEntry.objects.for_tenant(visit.tenant)
    )
    return found


def _tenants(visit: PageContext, rows: list[AuditEntry]) -> Mapping[int, Tenant]:
    if visit.access is not None:
        return {}
    return Tenant.objects.all_tenants().in_bulk({row.tenant_id for row in rows if row.tenant_id is not None})


def _entry(visit: PageContext, row: AuditEntry, tenants: Mapping[int, Tenant], one: str) -> AuditLogRow:
    changes = _changes(row)
    if row.before is None:  # of what is new, the list leaves out what is not set
        changes = tuple(one for one in changes if one.after != NONE)
    tenant = tenants.get(row.tenant_id or 0)
    gone = f"tenant {row.tenant_id}" if row.tenant_id is not None and visit.access is None else ""
    return AuditLogRow(
        id=row.pk,
        at=row.created_at,
        action=row.action,
        actor=row.actor,
        tenant=gone if tenant is None else tenant.name,
        tenant_url="" if tenant is None else f"?{urlencode({'tenant': tenant.slug})}",
        kind=row.object_type,
        name=row.object_name,
        changes=tuple(AuditChange(c.field, _short(c.before), _short(c.after)) for c in changes[:SHOWN]),
        more=max(0, len(changes) - SHOWN),
        url=visit.url(one, row.pk),
    )


def _changes(row: AuditEntry) -> tuple[AuditChange, ...]:
    before, after = row.before or {}, row.after or {}
    names = sorted({*before, *after})
    return tuple(AuditChange(name, _said(before, name), _said(after, name)) for name in names)


def _said(values: Mapping[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    value = values[name]
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 1]}…"


def _text(visit: PageContext, name: str) -> str:
    return visit.query.get(name, "").strip()[:200].replace("\0", "")


def _number(visit: PageContext, name: str) -> int | None:
    text = visit.query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _times(visit: PageContext) -> tuple[dict[str, datetime], str]:
    """Return what the days asked for mean, in UTC, and what is wrong with them."""
    found: dict[str, datetime] = {}
    for name, lookup, more in (("from", "at__gte", timedelta()), ("to", "at__lt", timedelta(days=1))):
        if text := visit.query.get(name, ""):
            try:
                found[lookup] = instant(text).astimezone(UTC) + more
            except ValueError:
                return {}, "Enter dates as YYYY-MM-DD."
    return found, ""


def _page(visit: PageContext, **cursor: int) -> str:
    kept = {name: value for name, value in visit.query.items() if name not in ("before", "after")}
    return f"{visit.request.path.partition('panels/')[0]}?{urlencode(kept | cursor)}"
