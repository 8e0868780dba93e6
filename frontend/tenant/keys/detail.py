"""The page of one key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.http import Http404

from frontend.core.labels import verdict_label
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.keys.bounds import KeyBoundRow, row_of
from frontend.tenant.keys.page import SCOPES, owner, restrictions, spending, status, successors, with_use
from millrace.apps.request_log.limiting_factor import binding
from millrace.apps.request_log.models import RequestOutcome
from millrace.apps.request_log.selectors import Filters, requests_page
from tenants.models import ApiKey, AuditEntry
from tenants.permissions import Permission

LATEST = 6
_WEEK = timedelta(days=7)
_KINDS = {
    RequestOutcome.COMPLETED: "good",
    RequestOutcome.LIMITED: "warn",
    RequestOutcome.REFUSED: "warn",
    RequestOutcome.FAILED: "bad",
}


@dataclass(frozen=True)
class KeyDetailHeader:
    """What stands above the panels, and where its buttons lead; empty: one may not, or it makes no sense any more."""

    pk: int
    name: str
    prefix: str
    status: str
    status_kind: str
    edit_url: str
    rotate_url: str
    revoke_url: str
    playground_url: str
    successor_url: str


@dataclass(frozen=True)
class KeyDetailStats:
    spend: Money
    requests: int
    tokens: int
    last_used: datetime | None
    expires_at: datetime | None


@dataclass(frozen=True)
class KeyDetailBounds:
    rows: tuple[KeyBoundRow, ...]
    own: bool
    limit_url: str
    budget_url: str


@dataclass(frozen=True)
class Facts:
    project: str
    owner: str
    scopes: tuple[str, ...]
    models: tuple[str, ...]  # empty: all
    addresses: tuple[str, ...]  # empty: any
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    restrictions: str


@dataclass(frozen=True)
class RequestRow:
    request_id: str
    url: str
    at: datetime
    verdict: str
    verdict_kind: str
    model: str
    cost: Money | None


@dataclass(frozen=True)
class Latest:
    rows: tuple[RequestRow, ...]
    all_url: str


@dataclass(frozen=True)
class KeyDetailChange:
    action: str
    at: datetime
    actor: str
    fields: str


@dataclass(frozen=True)
class KeyDetailHistory:
    rows: tuple[KeyDetailChange, ...]


def key_of(visit: PageContext) -> ApiKey:
    """Return the key that the address names, asked once a page. In the visit's scope."""
    pk = visit.arguments["key"]
    found = visit.once(("key", pk), lambda: with_use(ApiKey.objects.for_tenant(visit.tenant)).filter(pk=pk).first())
    if found is None:
        raise Http404
    return found


def _bounds(visit: PageContext, key: ApiKey) -> list[KeyBoundRow]:
    found = visit.once(("bounds", key.pk), lambda: binding(visit.tenant.pk, [key])[key.pk])
    return [row_of(bound) for bound in found]


def head(visit: PageContext) -> KeyDetailHeader:
    key = key_of(visit)
    next_one = ApiKey.objects.for_tenant(visit.tenant).filter(replaces=key, revoked_at=None).first()
    label, kind = status(visit, key, _bounds(visit, key), replaced=bool(successors(visit, [key])))
    writes = may_change(visit, key)
    return KeyDetailHeader(
        key.pk,
        key.name,
        f"{key.prefix}…",
        label,
        kind,
        visit.url("keys-edit", key.pk) if writes and key.is_live else "",
        visit.url("keys-rotate", key.pk) if writes and key.is_live and next_one is None else "",
        visit.url("keys-revoke", key.pk) if writes and key.revoked_at is None else "",
        f"{visit.url('playground')}?key={key.pk}" if writes and key.is_live and "inference" in key.scopes else "",
        visit.url("keys-detail", next_one.pk) if next_one else "",
    )


def may_change(visit: PageContext, key: ApiKey) -> bool:
    """Require the permission to change a key with management scopes."""
    return visit.may(Permission.KEYS_MANAGE if "manage" in key.scopes else Permission.KEYS_WRITE)


def figures(visit: PageContext) -> KeyDetailStats:
    key = key_of(visit)
    spent = spending(visit, "key").get(key.pk)
    inputs = ("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output")
    return KeyDetailStats(
        Money(spent["cost_femto"] if spent else 0),
        spent["completed"] + spent["cancelled"] if spent else 0,
        sum(spent[name] for name in inputs) if spent else 0,
        getattr(key, "last_used", None),
        key.expires_at,
    )


def bounds(visit: PageContext) -> KeyDetailBounds:
    """All that holds for it, what has least left first."""
    key = key_of(visit)
    rows = _bounds(visit, key)
    writes = visit.may(Permission.LIMITS_WRITE) and key.is_live
    return KeyDetailBounds(
        tuple(rows),
        any(row.is_own for row in rows),
        f"{visit.link('budgets-limits-new')}?whose=key:{key.pk}" if writes else "",
        f"{visit.link('budgets-new')}?whose=key:{key.pk}" if writes else "",
    )


def facts(visit: PageContext) -> Facts:
    key = key_of(visit)
    return Facts(
        key.project.name,
        owner(key),
        tuple(SCOPES.get(scope, scope) for scope in key.scopes),
        tuple(key.allowed_models or ()),
        tuple(key.allowed_ip_ranges or ()),
        key.created_at,
        key.expires_at,
        key.revoked_at,
        restrictions(key),
    )


def latest(visit: PageContext) -> Latest:
    """Its newest requests."""
    key = key_of(visit)
    page = requests_page(Filters(visit.tenant.pk, start=visit.now - 4 * _WEEK, key_id=key.pk), size=LATEST)
    return Latest(
        tuple(
            RequestRow(
                listed.record.request_id,
                visit.url("requests-detail", listed.record.request_id),
                listed.record.started_at,
                verdict_label(listed.record.outcome),
                _KINDS.get(RequestOutcome(listed.record.outcome), ""),
                listed.record.served_model or listed.record.requested_model,
                Money(listed.usage.cost_femto) if listed.usage else None,
            )
            for listed in page.rows
        ),
        f"{visit.url('requests')}?range=30d&key={key.pk}",
    )


def history(visit: PageContext) -> KeyDetailHistory:
    """Return what was changed of it."""
    key = key_of(visit)
    rows = AuditEntry.objects.for_tenant(visit.tenant).filter(object_type="apikey", object_id=key.pk).order_by("-pk")
    return KeyDetailHistory(
        tuple(KeyDetailChange(row.action, row.created_at, row.actor, _changed(row)) for row in rows[:LATEST])
    )


def _changed(row: AuditEntry) -> str:
    before, after = row.before or {}, row.after or {}
    if not before:
        return ""
    return ", ".join(sorted(name for name in {*before, *after} if before.get(name) != after.get(name)))
