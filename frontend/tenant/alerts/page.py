"""The history of alerts with filters, and the channels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from billing.budgets.alerts import alerts_of
from billing.models import Budget, BudgetAlert
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import ListPage, keyset_page, named_rows, number_param
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.alerts import alert_rows
from tenants.models import WebhookEndpoint
from tenants.webhooks.event_types import EVENT_TYPES
from tenants.webhooks.queries import endpoints_with_last

PAGE_SIZE = 30
STATES = {"open": _lazy("Open"), "acknowledged": _lazy("Acknowledged")}
ALERT_EVENTS = {name for name, event_type in EVENT_TYPES.items() if event_type.is_alert}


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips. Call inside `ctx.scope()`."""
    url, state = ctx.url("alerts"), ctx.query.get("state", "")
    budgets = named_rows(Budget.objects.for_tenant(ctx.tenant))
    return filter_bar(
        ctx,
        url,
        (
            choice_chip(ctx, url, "state", _("State"), STATES.items(), state if state in STATES else None),
            choice_chip(ctx, url, "budget", _("Budget"), budgets, number_param(ctx, "budget")),
        ),
    )


def _select_alerts(ctx: PageContext) -> QuerySet[BudgetAlert]:
    """Return the alerts that the filters of the page select."""
    rows = alerts_of(ctx.tenant.pk, number_param(ctx, "budget"))
    if (state := ctx.query.get("state")) in STATES:
        rows = rows.filter(acknowledged_at__isnull=state == "open")
    return rows


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the newest alerts with the page's filters. Call inside `ctx.scope()`."""
    for row in _select_alerts(ctx)[:MAX_EXPORTED]:
        budget, at = row.budget, row.acknowledged_at
        amounts = (budget.unit, row.used, row.limit, row.forecast)
        yield (
            row.pk,
            row.created_at.isoformat(),
            budget.pk,
            budget.name,
            row.threshold,
            *amounts,
            at and at.isoformat(),
        )


TOOLS = ListTools(
    "alerts",
    exported=(
        *("id", "created_at", "budget_id", "budget", "threshold", "unit", "used", "limit", "forecast"),
        "acknowledged_at",
    ),
    rows=export_rows,
    columns={},
    views=((_lazy("All"), {}), (_lazy("Open"), {"state": "open"})),
)


def history(ctx: PageContext) -> ListPage:
    """Return a page of alerts, newest first."""
    rows = _select_alerts(ctx)
    filtered = any(ctx.query.get(name) for name in ("state", "budget"))
    page = keyset_page(ctx, rows, ctx.url("alerts"), PAGE_SIZE, filtered=filtered)
    return replace(page, rows=alert_rows(ctx, list(page.rows)))


def channels(ctx: PageContext) -> list[dict[str, Any]]:
    """Return the webhooks and channels that receive alerts, oldest first."""
    rows = endpoints_with_last(ctx.tenant.pk).exclude(kind=WebhookEndpoint.Kind.LISTENER).order_by("pk")
    return [_channel(row) for row in rows if not row.event_types or ALERT_EVENTS.intersection(row.event_types)]


def _channel(row: WebhookEndpoint) -> dict[str, Any]:
    state, kind = (_("Active"), "good") if row.active else (_("Disabled"), "bad")
    if row.active and row.failing_since:
        state, kind = _("Failing"), "warn"
    return {"endpoint": row, "state": state, "kind": kind, "last_at": getattr(row, "last_at", None)}
