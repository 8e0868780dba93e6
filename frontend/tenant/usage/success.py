"""Cost per successful request: the rows of the panel and of its CSV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from billing.metering.usage import TooManyRows
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import Choice, changed_url, with_query
from frontend.core.numbers import Money, common_places, exact, share
from frontend.core.page_context import PageContext
from frontend.tenant.requests.log import CACHE_LABELS
from frontend.tenant.usage.query import query_of
from millrace.apps.request_log.success_costs import SuccessCosts, SuccessGroup, success_costs, total_success_costs
from tenants.models import ApiKey

MAX_ROWS = 50
LABELS: Mapping[SuccessGroup, str] = {
    "model": _lazy("Model"),
    "policy": _lazy("Policy version"),
    "cache_layer": _lazy("Cache layer"),
    "key": _lazy("API key"),
    "end_user": _lazy("End user"),
}
_SIGNS = {
    "bad_feedback": _lazy("bad feedback"),
    "schema_failures": "schema",
    "tool_failures": _lazy("tool call"),
    "retried": _lazy("sent again"),
    "cancelled": "aborted",
    "errors": "error",
}
COLUMNS = ("requests", "succeeded", "feedback", *_SIGNS)
_EMPTY = {
    "model": _lazy("No model"),
    "policy": _lazy("Without a policy"),
    "cache_layer": _lazy("Unknown layer"),
    "end_user": _lazy("Without an end user"),
}


def group_of(ctx: PageContext) -> SuccessGroup:
    """Return the grouping in the URL. Invalid values are ignored."""
    return next((group for group in LABELS if group == ctx.query.get("success_by")), "model")


def named_rows(ctx: PageContext) -> list[tuple[str, SuccessCosts]]:
    """Return the names of all groups with their rows, those with the highest cost first.

    Raises:
        TooManyRows: there are too many groups.
    """
    now, group = query_of(ctx), group_of(ctx)
    asked, dates = now.question, now.date_range
    filters: dict[str, Any] = {"model": asked.model, "key_id": asked.key_id, "project_id": asked.project_id}
    rows = success_costs(ctx.tenant.pk, dates.start, dates.end, group, **filters)
    if group == "key":
        known = ApiKey.objects.for_tenant(ctx.tenant).in_bulk([int(row.name) for row in rows])
        return [
            (
                known[int(row.name)].name
                if int(row.name) in known
                else _("Key %(name)s, deleted") % {"name": row.name},
                row,
            )
            for row in rows
        ]
    if group == "cache_layer":
        return [(CACHE_LABELS.get(row.name, row.name) or _EMPTY[group], row) for row in rows]
    return [(row.name or _EMPTY[group], row) for row in rows]


def success(ctx: PageContext) -> dict[str, Any]:
    """Return successful requests and the cost per success by group."""
    now = group_of(ctx)
    groups = [Choice(label, changed_url(ctx, "", success_by=group), group == now) for group, label in LABELS.items()]
    panel: dict[str, Any] = {"label": LABELS[now], "groups": groups}
    try:
        rows = named_rows(ctx)
    except TooManyRows:
        return panel | {"too_many": True}
    shown = [_row(name, row) for name, row in rows[:MAX_ROWS]]
    return panel | {
        "rows": shown,
        "total": _row(_("All"), total_success_costs([row for _name, row in rows])),
        "others": len(rows) - len(shown),
        "cost_places": common_places(row["cost"] for row in shown),
        "places": common_places(row["per_success"] for row in shown if row["per_success"] is not None),
        "csv_url": with_query(ctx.url("usage-success-csv"), **ctx.query),
    }


def _row(name: str, row: SuccessCosts) -> dict[str, Any]:
    per_success = row.cost_per_success_femto
    signs = [f"{label}: {exact(count)}" for column, label in _SIGNS.items() if (count := getattr(row, column))]
    return {
        "name": name,
        "usage": row,
        "rate": share(row.succeeded, row.requests),
        "signs": ", ".join(signs),
        "cost": Money(row.cost_femto),
        "per_success": None if per_success is None else Money(per_success),
    }
