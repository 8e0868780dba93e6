"""Webhooks: endpoints, deliveries, and one delivery."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_message
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar
from frontend.core.labels import choice_label
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import ListPage, keyset_page, number_param
from frontend.core.page_context import PageContext, first_or_404
from tenants.models import WebhookDelivery, WebhookEndpoint
from tenants.webhooks.event_types import EVENT_TYPES
from tenants.webhooks.queries import deliveries, endpoints_with_last

PAGE_SIZE = 50
State = WebhookDelivery.State
OPEN_STATES = (State.PENDING, State.WAITING)
BADGES = {
    State.DELIVERED.value: "good",
    State.FAILED.value: "bad",
    State.PENDING.value: "info",
    State.WAITING.value: "info",
}


def endpoints(ctx: PageContext) -> list[dict[str, Any]]:
    """Return the tenant's endpoints, oldest first. Call inside `ctx.scope()`."""
    return [_endpoint(ctx, row) for row in endpoints_with_last(ctx.tenant.pk).order_by("pk")]


def endpoint(ctx: PageContext) -> dict[str, Any]:
    """Return the endpoint in the URL. Call inside `ctx.scope()`."""
    return _endpoint(ctx, first_or_404(endpoints_with_last(ctx.tenant.pk).filter(pk=ctx.arguments["endpoint"])))


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips. Call inside `ctx.scope()`."""
    url, state, kind = ctx.url("webhooks"), ctx.query.get("state"), ctx.query.get("kind")
    rows = WebhookEndpoint.objects.for_tenant(ctx.tenant).order_by("pk").values_list("pk", "url")
    states = [(value, choice_label(label)) for value, label in State.choices]
    kinds = [(name, name) for name in EVENT_TYPES]
    return filter_bar(
        ctx,
        url,
        (
            choice_chip(ctx, url, "state", _("State"), states, state if state in State.values else None),
            choice_chip(ctx, url, "kind", _("Event"), kinds, kind if kind in EVENT_TYPES else None),
            choice_chip(ctx, url, "endpoint", _("Endpoint"), rows, number_param(ctx, "endpoint")),
        ),
    )


def _select_deliveries(ctx: PageContext) -> QuerySet[WebhookDelivery]:
    """Return the deliveries that the filters of the page select."""
    rows = deliveries(ctx.tenant.pk)
    if (state := ctx.query.get("state")) in State.values:
        rows = rows.filter(state=state)
    if (kind := ctx.query.get("kind")) in EVENT_TYPES:
        rows = rows.filter(event__event_type=kind)
    if (chosen := number_param(ctx, "endpoint")) is not None:
        rows = rows.filter(endpoint_id=chosen)
    return rows


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the newest deliveries with the page's filters. Call inside `ctx.scope()`."""
    for row in _select_deliveries(ctx).order_by("-pk")[:MAX_EXPORTED]:
        tries = list(row.attempts.all())
        last = tries[-1] if tries else None
        yield (
            *(row.event.public_id, row.event.event_type, row.created_at.isoformat(), row.endpoint.url, row.state),
            *(len(tries), last and last.status, last and last.error),
        )


TOOLS = ListTools(
    "webhooks",
    exported=("webhook_id", "event", "created_at", "url", "state", "attempts", "last_status", "last_error"),
    rows=export_rows,
    columns={
        "time": _lazy("Time"),
        "endpoint": _lazy("Endpoint"),
        "state": _lazy("State"),
        "attempts": _lazy("#Attempts"),
        "last": _lazy("Last response"),
    },
    views=(
        (_lazy("All"), {}),
        (_lazy("Failed"), {"state": "failed"}),
        (_lazy("Pending"), {"state": "pending"}),
    ),
)


def log(ctx: PageContext) -> ListPage:
    """Return a page of deliveries, newest first."""
    page = keyset_page(ctx, _select_deliveries(ctx), ctx.url("webhooks"), PAGE_SIZE, filtered=_is_filtered(ctx))
    return replace(page, rows=[_delivery(ctx, row) for row in page.rows], **TOOLS.table(ctx))


def delivery_detail(ctx: PageContext) -> dict[str, Any]:
    """Return the delivery in the URL: the event as sent, and each attempt. Call inside `ctx.scope()`."""
    row = first_or_404(deliveries(ctx.tenant.pk).filter(pk=ctx.arguments["delivery"]))
    body = {"type": row.event.event_type, "timestamp": row.event.created_at.isoformat(), "data": row.event.payload}
    attempts = reversed(list(enumerate(row.attempts.all(), 1)))
    return {
        **_delivery(ctx, row),
        "body": json.dumps(body, indent=2, ensure_ascii=False),
        "attempts": [
            (
                attempt,
                _answer(attempt.status, attempt.error),
                _("Start of the response to attempt %(number)s") % {"number": number},
            )
            for number, attempt in attempts
        ],
    }


def _endpoint(ctx: PageContext, row: WebhookEndpoint) -> dict[str, Any]:
    until = row.previous_expires_at
    # Annotations of endpoints_with_last.
    at, status, error = (getattr(row, name) for name in ("last_at", "last_status", "last_error"))
    return {
        "endpoint": row,
        "two_secrets_until": until if until is not None and until > ctx.now else None,
        "last_at": at,
        "last": None if at is None else _answer(status, error or ""),
    }


def _delivery(ctx: PageContext, row: WebhookDelivery) -> dict[str, Any]:
    tries = list(row.attempts.all())
    return {
        "delivery": row,
        "badge": BADGES[row.state],
        "tries": len(tries),
        "next_at": row.next_attempt_at if row.state in OPEN_STATES and row.next_attempt_at > ctx.now else None,
        "last": _answer(tries[-1].status, tries[-1].error) if tries else None,
    }


def _answer(status: int | None, error: str) -> tuple[str, str]:
    """Return the result of an attempt, and the color of its badge."""
    if status is not None and 200 <= status < 300:
        return str(status), "good"
    return " · ".join(part for part in (str(status or ""), translate_message(error)) if part) or _("No response"), "bad"


def _is_filtered(ctx: PageContext) -> bool:
    return any(ctx.query.get(name) for name in ("state", "kind", "endpoint"))
