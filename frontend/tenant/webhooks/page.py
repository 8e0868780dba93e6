"""View models of webhooks: endpoints, deliveries, and one delivery."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode

from frontend.core.page_context import PageContext
from tenants.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint
from tenants.permissions import Permission
from tenants.webhooks.event_types import EVENT_TYPES
from tenants.webhooks.queries import deliveries, endpoints_with_last

PAGE_SIZE = 50
State = WebhookDelivery.State
BADGES = {State.DELIVERED.value: "good", State.FAILED.value: "bad", State.PENDING.value: "info"}


@dataclass(frozen=True)
class DeliveryResult:
    """The result of an attempt. `kind` is the color of the badge; `text` is empty before the first attempt."""

    text: str
    kind: str


@dataclass(frozen=True)
class Endpoint:
    url: str
    description: str
    kinds: tuple[str, ...]  # empty: all
    active: bool
    why_not: str
    failing_since: datetime | None
    two_secrets_until: datetime | None
    last_at: datetime | None
    last: DeliveryResult
    one_url: str


@dataclass(frozen=True)
class Delivery:
    id: int
    kind: str
    uid: str
    at: datetime
    endpoint: str
    state: str
    badge: str
    tries: int
    next_at: datetime | None
    last: DeliveryResult
    url: str


@dataclass(frozen=True)
class WebhookChoice:
    value: str
    label: str
    chosen: bool


@dataclass(frozen=True)
class WebhookFilters:
    endpoints: tuple[WebhookChoice, ...]
    states: tuple[WebhookChoice, ...]
    kinds: tuple[WebhookChoice, ...]
    clear_url: str


@dataclass(frozen=True)
class WebhookLog:
    rows: tuple[Delivery, ...]
    newer_url: str
    older_url: str
    filtered: bool


@dataclass(frozen=True)
class DeliveryAttempt:
    at: datetime
    answer: DeliveryResult
    us: int
    excerpt: str
    excerpt_label: str


@dataclass(frozen=True)
class WebhookDetail:
    """One delivery: the event as sent, and each attempt."""

    row: Delivery
    body: str
    tries: tuple[DeliveryAttempt, ...]
    replay_url: str  # empty without permission or for a disabled endpoint
    why_no_replay: str


def endpoints(ctx: PageContext) -> tuple[Endpoint, ...]:
    """Return the tenant's endpoints, oldest first. Call inside `ctx.scope()`."""
    return tuple(_endpoint(ctx, row) for row in endpoints_with_last(ctx.tenant.pk).order_by("pk"))


def endpoint(ctx: PageContext, pk: int) -> Endpoint | None:
    row = endpoints_with_last(ctx.tenant.pk).filter(pk=pk).first()
    return None if row is None else _endpoint(ctx, row)


def filters(ctx: PageContext) -> WebhookFilters:
    """Return the filters of the query string. Call inside `ctx.scope()`."""
    query = ctx.query
    rows = WebhookEndpoint.objects.for_tenant(ctx.tenant).order_by("pk")
    return WebhookFilters(
        endpoints=tuple(WebhookChoice(str(row.pk), row.url, query.get("endpoint") == str(row.pk)) for row in rows),
        states=tuple(WebhookChoice(value, str(label), query.get("state") == value) for value, label in State.choices),
        kinds=tuple(WebhookChoice(kind, kind, query.get("kind") == kind) for kind in EVENT_TYPES),
        clear_url=ctx.url("webhooks") if _filtered(ctx) else "",
    )


def log(ctx: PageContext) -> WebhookLog:
    """Return a page of deliveries, newest first."""
    rows = deliveries(ctx.tenant.pk)
    query = ctx.query
    if query.get("state") in State.values:
        rows = rows.filter(state=query["state"])
    if query.get("kind") in EVENT_TYPES:
        rows = rows.filter(event__kind=query["kind"])
    if (chosen := _number(ctx, "endpoint")) is not None:
        rows = rows.filter(endpoint_id=chosen)
    before, after = _number(ctx, "before"), _number(ctx, "after")
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("pk")[: PAGE_SIZE + 1])
        older, newer, found = True, len(found) > PAGE_SIZE, found[:PAGE_SIZE][::-1]
    else:
        found = list((rows.filter(pk__lt=before) if before is not None else rows).order_by("-pk")[: PAGE_SIZE + 1])
        older, newer, found = len(found) > PAGE_SIZE, before is not None, found[:PAGE_SIZE]
    return WebhookLog(
        rows=tuple(_delivery(ctx, row) for row in found),
        newer_url=_page_url(ctx, **({"after": found[0].pk} if found else {})) if newer else "",
        older_url=_page_url(ctx, before=found[-1].pk) if older and found else "",
        filtered=_filtered(ctx),
    )


def delivery_detail(ctx: PageContext, pk: int) -> WebhookDetail | None:
    """Return one delivery; None if it does not exist. Call inside `ctx.scope()`."""
    row = deliveries(ctx.tenant.pk).filter(pk=pk).first()
    if row is None:
        return None
    body = {"type": row.event.event_type, "timestamp": row.event.created_at.isoformat(), "data": row.event.payload}
    may = ctx.may(Permission.WEBHOOKS_WRITE)
    return WebhookDetail(
        row=_delivery(ctx, row),
        body=json.dumps(body, indent=2, ensure_ascii=False),
        tries=tuple(_attempt(number, attempt) for number, attempt in reversed(list(enumerate(row.attempts.all(), 1)))),
        replay_url=ctx.url("webhooks-replay", row.pk) if may and row.endpoint.active else "",
        why_no_replay="" if row.endpoint.active else "The endpoint is disabled. Enable it first.",
    )


def _endpoint(ctx: PageContext, row: WebhookEndpoint) -> Endpoint:
    until = (
        row.previous_expires_at if row.previous_expires_at is not None and row.previous_expires_at > ctx.now else None
    )
    # Annotations of endpoints_with_last.
    at, status, error = (getattr(row, name) for name in ("last_at", "last_status", "last_error"))
    return Endpoint(
        url=row.url,
        description=row.description,
        kinds=tuple(row.event_types),
        active=row.active,
        why_not=row.disabled_because,
        failing_since=row.failing_since,
        two_secrets_until=until,
        last_at=at,
        last=DeliveryResult("", "") if at is None else _error_text(status, error or ""),
        one_url=ctx.url("webhooks-detail", row.pk),
    )


def _delivery(ctx: PageContext, row: WebhookDelivery) -> Delivery:
    tries = list(row.attempts.all())
    return Delivery(
        id=row.pk,
        kind=row.event.event_type,
        uid=row.event.public_id,
        at=row.created_at,
        endpoint=row.endpoint.url,
        state=row.get_state_display(),
        badge=BADGES[row.state],
        tries=len(tries),
        next_at=row.next_attempt_at if row.state == State.PENDING and row.next_attempt_at > ctx.now else None,
        last=_result(tries[-1]) if tries else DeliveryResult("", ""),
        url=ctx.url("webhooks-delivery", row.pk),
    )


def _attempt(number: int, attempt: WebhookAttempt) -> DeliveryAttempt:
    return DeliveryAttempt(
        attempt.attempted_at,
        _result(attempt),
        attempt.duration_ms * 1000,
        attempt.excerpt,
        f"Start of the response to attempt {number}",
    )


def _result(attempt: WebhookAttempt) -> DeliveryResult:
    return _error_text(attempt.status, attempt.error)


def _error_text(status: int | None, error: str) -> DeliveryResult:
    if status is not None and 200 <= status < 300:
        return DeliveryResult(str(status), "good")
    return DeliveryResult(" · ".join(part for part in (str(status or ""), error) if part) or "No response", "bad")


def _filtered(ctx: PageContext) -> bool:
    return any(ctx.query.get(name) for name in ("state", "kind", "endpoint"))


def _number(ctx: PageContext, name: str) -> int | None:
    text = ctx.query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _page_url(ctx: PageContext, **cursor: int) -> str:
    params = {name: value for name, value in ctx.query.items() if name not in ("before", "after")}
    return f"{ctx.url('webhooks')}?{urlencode(params | cursor)}"
