"""Webhooks as the page shows them: endpoints, deliveries, and the story of one."""

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

SIZE = 50
State = WebhookDelivery.State
BADGES = {State.DELIVERED.value: "good", State.FAILED.value: "bad", State.PENDING.value: "info"}


@dataclass(frozen=True)
class Answer:
    """What came of a try. `kind`: the badge's; empty text: nothing was tried yet."""

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
    last: Answer
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
    last: Answer
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
class Try:
    at: datetime
    answer: Answer
    us: int
    excerpt: str
    excerpt_label: str


@dataclass(frozen=True)
class WebhookDetail:
    """One delivery: the event as it is sent, and each try."""

    row: Delivery
    body: str
    tries: tuple[Try, ...]
    replay_url: str  # empty: the endpoint is disabled, or this person may not
    why_no_replay: str


def endpoints(visit: PageContext) -> tuple[Endpoint, ...]:
    """All of the tenant's, oldest first. In the visit's scope."""
    return tuple(_endpoint(visit, row) for row in endpoints_with_last(visit.tenant.pk).order_by("pk"))


def endpoint(visit: PageContext, pk: int) -> Endpoint | None:
    row = endpoints_with_last(visit.tenant.pk).filter(pk=pk).first()
    return None if row is None else _endpoint(visit, row)


def fields(visit: PageContext) -> WebhookFilters:
    """Return the filters as they were asked for. In the visit's scope."""
    query = visit.query
    rows = WebhookEndpoint.objects.for_tenant(visit.tenant).order_by("pk")
    return WebhookFilters(
        endpoints=tuple(WebhookChoice(str(row.pk), row.url, query.get("endpoint") == str(row.pk)) for row in rows),
        states=tuple(WebhookChoice(value, str(label), query.get("state") == value) for value, label in State.choices),
        kinds=tuple(WebhookChoice(kind, kind, query.get("kind") == kind) for kind in EVENT_TYPES),
        clear_url=visit.url("webhooks") if _filtered(visit) else "",
    )


def log(visit: PageContext) -> WebhookLog:
    """Return a page of deliveries, newest first."""
    rows = deliveries(visit.tenant.pk)
    query = visit.query
    if query.get("state") in State.values:
        rows = rows.filter(state=query["state"])
    if query.get("kind") in EVENT_TYPES:
        rows = rows.filter(event__kind=query["kind"])
    if (chosen := _number(visit, "endpoint")) is not None:
        rows = rows.filter(endpoint_id=chosen)
    before, after = _number(visit, "before"), _number(visit, "after")
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("pk")[: SIZE + 1])
        older, newer, found = True, len(found) > SIZE, found[:SIZE][::-1]
    else:
        found = list((rows.filter(pk__lt=before) if before is not None else rows).order_by("-pk")[: SIZE + 1])
        older, newer, found = len(found) > SIZE, before is not None, found[:SIZE]
    return WebhookLog(
        rows=tuple(_delivery(visit, row) for row in found),
        newer_url=_page(visit, **({"after": found[0].pk} if found else {})) if newer else "",
        older_url=_page(visit, before=found[-1].pk) if older and found else "",
        filtered=_filtered(visit),
    )


def story(visit: PageContext, pk: int) -> WebhookDetail | None:
    """All of one delivery; None: there is no such. In the visit's scope."""
    row = deliveries(visit.tenant.pk).filter(pk=pk).first()
    if row is None:
        return None
    body = {"type": row.event.event_type, "timestamp": row.event.created_at.isoformat(), "data": row.event.payload}
    may = visit.may(Permission.WEBHOOKS_WRITE)
    return WebhookDetail(
        row=_delivery(visit, row),
        body=json.dumps(body, indent=2, ensure_ascii=False),
        tries=tuple(_try(number, one) for number, one in reversed(list(enumerate(row.attempts.all(), 1)))),
        replay_url=visit.url("webhooks-replay", row.pk) if may and row.endpoint.active else "",
        why_no_replay="" if row.endpoint.active else "The endpoint is disabled. Enable it first.",
    )


def _endpoint(visit: PageContext, row: WebhookEndpoint) -> Endpoint:
    until = (
        row.previous_expires_at if row.previous_expires_at is not None and row.previous_expires_at > visit.now else None
    )
    # What endpoints_with_last has annotated.
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
        last=Answer("", "") if at is None else _said(status, error or ""),
        one_url=visit.url("webhooks-detail", row.pk),
    )


def _delivery(visit: PageContext, row: WebhookDelivery) -> Delivery:
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
        next_at=row.next_attempt_at if row.state == State.PENDING and row.next_attempt_at > visit.now else None,
        last=_answer(tries[-1]) if tries else Answer("", ""),
        url=visit.url("webhooks-delivery", row.pk),
    )


def _try(number: int, one: WebhookAttempt) -> Try:
    return Try(
        one.attempted_at,
        _answer(one),
        one.duration_ms * 1000,
        one.excerpt,
        f"Start of the response to attempt {number}",
    )


def _answer(one: WebhookAttempt) -> Answer:
    return _said(one.status, one.error)


def _said(status: int | None, error: str) -> Answer:
    if status is not None and 200 <= status < 300:
        return Answer(str(status), "good")
    return Answer(" · ".join(part for part in (str(status or ""), error) if part) or "No response", "bad")


def _filtered(visit: PageContext) -> bool:
    return any(visit.query.get(name) for name in ("state", "kind", "endpoint"))


def _number(visit: PageContext, name: str) -> int | None:
    text = visit.query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _page(visit: PageContext, **cursor: int) -> str:
    kept = {name: value for name, value in visit.query.items() if name not in ("before", "after")}
    return f"{visit.url('webhooks')}?{urlencode(kept | cursor)}"
