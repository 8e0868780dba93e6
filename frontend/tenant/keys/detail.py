"""View models of one key's page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.http import Http404

from billing.metering.usage import accepted
from frontend.core.labels import outcome_label
from frontend.core.numbers import Money, common_places
from frontend.core.page_context import PageContext
from frontend.tenant.keys.key_limits import KeyLimitRow, row_of
from frontend.tenant.keys.page import SCOPES, owner, restrictions, spending, status, successors, with_last_used
from inference_worker.contract.request import TOKEN_CLASSES
from millrace.apps.request_log.limiting_factor import binding
from millrace.apps.request_log.models import RequestOutcome
from millrace.apps.request_log.selectors import Filters, requests_page, served_model
from tenants.models import ApiKey, AuditEntry
from tenants.permissions import Permission

MAX_REQUESTS = 6
_WEEK = timedelta(days=7)
_KINDS = {
    RequestOutcome.COMPLETED: "good",
    RequestOutcome.LIMITED: "warn",
    RequestOutcome.REFUSED: "warn",
    RequestOutcome.FAILED: "bad",
}


@dataclass(frozen=True)
class KeyDetailHeader:
    """The title of the page and its actions. A URL is empty if the action is not allowed or not possible."""

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
    accepted: int
    tokens: int
    last_used: datetime | None
    expires_at: datetime | None


@dataclass(frozen=True)
class KeyDetailLimits:
    rows: tuple[KeyLimitRow, ...]
    own: bool
    limit_url: str
    budget_url: str


@dataclass(frozen=True)
class KeyPermissions:
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
    outcome: str
    outcome_kind: str
    model: str
    cost: Money | None


@dataclass(frozen=True)
class LatestRequests:
    rows: tuple[RequestRow, ...]
    all_url: str
    cost_places: int


@dataclass(frozen=True)
class KeyDetailChange:
    action: str
    at: datetime
    actor: str
    fields: str


@dataclass(frozen=True)
class KeyDetailHistory:
    rows: tuple[KeyDetailChange, ...]


def key_of(ctx: PageContext) -> ApiKey:
    """Return the key in the URL, loaded once per page. Call inside `ctx.scope()`."""
    pk = ctx.arguments["key"]
    found = ctx.once(("key", pk), lambda: with_last_used(ApiKey.objects.for_tenant(ctx.tenant)).filter(pk=pk).first())
    if found is None:
        raise Http404
    return found


def _limits(ctx: PageContext, key: ApiKey) -> list[KeyLimitRow]:
    found = ctx.once(("bounds", key.pk), lambda: binding(ctx.tenant.pk, [key])[key.pk])
    return [row_of(bound) for bound in found]


def header(ctx: PageContext) -> KeyDetailHeader:
    key = key_of(ctx)
    next_one = ApiKey.objects.for_tenant(ctx.tenant).filter(replaces=key, revoked_at=None).first()
    label, kind = status(ctx, key, _limits(ctx, key), replaced=bool(successors(ctx, [key])))
    writes = may_change(ctx, key)
    return KeyDetailHeader(
        key.pk,
        key.name,
        f"{key.prefix}…",
        label,
        kind,
        ctx.url("keys-edit", key.pk) if writes and key.is_live else "",
        ctx.url("keys-rotate", key.pk) if writes and key.is_live and next_one is None else "",
        ctx.url("keys-revoke", key.pk) if writes and key.revoked_at is None else "",
        f"{ctx.url('playground')}?key={key.pk}" if writes and key.is_live and "inference" in key.scopes else "",
        ctx.url("keys-detail", next_one.pk) if next_one else "",
    )


def may_change(ctx: PageContext, key: ApiKey) -> bool:
    """Return whether the user may change the key. Keys with management scopes need KEYS_MANAGE."""
    return ctx.may(Permission.KEYS_MANAGE if "manage" in key.scopes else Permission.KEYS_WRITE)


def stats(ctx: PageContext) -> KeyDetailStats:
    key = key_of(ctx)
    spent = spending(ctx, "key").get(key.pk)
    return KeyDetailStats(
        Money(spent["cost_femto"] if spent else 0),
        accepted(spent) if spent else 0,
        sum(spent[name] for name in TOKEN_CLASSES) if spent else 0,
        getattr(key, "last_used", None),
        key.expires_at,
    )


def limits(ctx: PageContext) -> KeyDetailLimits:
    """Return all limits and budgets that apply to the key, least remaining first."""
    key = key_of(ctx)
    rows = _limits(ctx, key)
    writes = ctx.may(Permission.LIMITS_WRITE) and key.is_live
    return KeyDetailLimits(
        tuple(rows),
        any(row.is_own for row in rows),
        f"{ctx.url('budgets-limits-new')}?owner=key:{key.pk}" if writes else "",
        f"{ctx.url('budgets-new')}?owner=key:{key.pk}" if writes else "",
    )


def permissions(ctx: PageContext) -> KeyPermissions:
    key = key_of(ctx)
    return KeyPermissions(
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


def latest_requests(ctx: PageContext) -> LatestRequests:
    """Return the newest requests of the key."""
    key = key_of(ctx)
    page = requests_page(Filters(ctx.tenant.pk, start=ctx.now - 4 * _WEEK, key_id=key.pk), size=MAX_REQUESTS)
    rows = tuple(
        RequestRow(
            listed.record.request_id,
            ctx.url("requests-detail", listed.record.request_id),
            listed.record.started_at,
            outcome_label(listed.record.outcome),
            _KINDS.get(RequestOutcome(listed.record.outcome), ""),
            served_model(listed.record) or listed.record.requested_model,
            Money(listed.usage.cost_femto) if listed.usage else None,
        )
        for listed in page.rows
    )
    all_url = f"{ctx.url('requests')}?range=30d&key={key.pk}"
    return LatestRequests(rows, all_url, common_places(row.cost for row in rows))


def history(ctx: PageContext) -> KeyDetailHistory:
    """Return the changes of the key from the audit log."""
    key = key_of(ctx)
    rows = AuditEntry.objects.for_tenant(ctx.tenant).filter(object_type="apikey", object_id=key.pk).order_by("-pk")
    return KeyDetailHistory(
        tuple(KeyDetailChange(row.action, row.created_at, row.actor, _changed(row)) for row in rows[:MAX_REQUESTS])
    )


def _changed(row: AuditEntry) -> str:
    before, after = row.before or {}, row.after or {}
    if not before:
        return ""
    return ", ".join(sorted(name for name in {*before, *after} if before.get(name) != after.get(name)))
