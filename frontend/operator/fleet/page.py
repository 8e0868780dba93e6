"""The fleet page, one function for each panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import redis

from frontend.core.charts import Chart, Series, Unit
from frontend.core.lists import Choice, with_query
from frontend.core.numbers import Margin
from frontend.core.page_context import PageContext
from millrace.apps.operations.costs import ModelCost, costs
from millrace.apps.operations.deployments import served_specs
from millrace.apps.operations.fleet_status import ReplicaState, ReplicaStatus, read_fleet_status
from millrace.apps.operations.history import FleetPoint, span
from millrace.apps.operations.models import ReplicaSample

CHARTS = 5
COLORS = ("spend", "output", "cached", "written", "failed")
MINUTE = timedelta(minutes=1)
# Selectable ranges: total length, and length of one point.
RANGES: dict[str, tuple[str, timedelta, timedelta]] = {
    "1h": ("1 hour", timedelta(hours=1), 2 * MINUTE),
    "6h": ("6 hours", timedelta(hours=6), 10 * MINUTE),
    "24h": ("24 hours", timedelta(hours=24), 30 * MINUTE),
    "7d": ("7 days", timedelta(days=7), 240 * MINUTE),
}
DEFAULT_RANGE = "6h"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class FleetQuery:
    """The filters of the query string. `model` is empty for all models."""

    name: str
    label: str
    start: datetime
    end: datetime
    bucket: timedelta
    model: str
    spans: tuple[Choice, ...]
    models: tuple[Choice, ...]


def query_of(ctx: PageContext) -> FleetQuery:
    """Return the range and the model of the query string; the defaults for invalid values."""
    name = ctx.query.get("span", DEFAULT_RANGE)
    name = name if name in RANGES else DEFAULT_RANGE
    known = [spec.name for spec in served_specs()]
    model = ctx.query.get("model", "")
    model = model if model in known else ""
    label, length, bucket = RANGES[name]
    end = ctx.now + bucket - (ctx.now - _EPOCH) % bucket
    spans = tuple(Choice(text, _url(option, model), option == name) for option, (text, _, _) in RANGES.items())
    models = tuple(Choice(option or "All models", _url(name, option), option == model) for option in ("", *known))
    return FleetQuery(name, label, end - length, end, bucket, model, spans, models if len(known) > 1 else ())


def workers(ctx: PageContext) -> list[dict[str, Any]]:
    """Return the workers in the selected range, with their current state."""
    query = query_of(ctx)
    models = _models(query)
    points = [point for point in span(query.start, query.end, query.end - query.start) if point.worker in models]
    now = _now()
    return [{"point": point, "model": models[point.worker], "now": now.get(point.worker)} for point in points]


def history(ctx: PageContext) -> dict[str, Any]:
    """Return the charts of the busiest workers, and the number of workers without a chart."""
    query = query_of(ctx)
    models = _models(query)
    points = [point for point in span(query.start, query.end, query.bucket) if point.worker in models]
    served: dict[str, int] = {}
    for point in points:
        served[point.worker] = served.get(point.worker, 0) + point.tokens
    drawn = sorted(sorted(served, key=lambda worker: -served[worker])[:CHARTS])
    seen = {(point.at, point.worker): point for point in points}
    kinds: tuple[tuple[str, str, str, Unit, Callable[[FleetPoint], int | None]], ...] = (
        ("compute", "Compute use", "share of time in forward passes", "percent", lambda point: point.forward),
        ("batch", "Batch size", "requests per step, average", "decimal", lambda point: point.batch),
        ("memory", "KV cache use", "blocks held by running requests", "percent", lambda point: point.kv_used),
        ("queue", "Queue", "requests claimed and not started, maximum", "count", lambda point: point.waiting),
        ("hits", "Prefix-cache hits", "share of prompt tokens", "percent", lambda point: point.hits),
        ("tokens", "Tokens served", f"every {_minutes(query.bucket)}", "tokens", lambda point: point.tokens),
    )
    drawings = [
        (title, detail, _chart(ctx, query, name, f"{title}, {detail}", unit, read, drawn, seen))
        for name, title, detail, unit, read in kinds
    ]
    return {"drawings": drawings if drawn else [], "left_out": max(0, len(served) - CHARTS)}


def cost(ctx: PageContext) -> dict[str, Any]:
    query = query_of(ctx)
    found = [cost for cost in costs(query.start, query.end) if not query.model or cost.model == query.model]
    return {
        "rows": [_cost(cost) for cost in found],
        "since": query.start.replace(minute=0, second=0, microsecond=0),
        "is_unset": all(cost.nano_per_hour is None for cost in found),
    }


def _models(query: FleetQuery) -> Mapping[str, str]:
    """Return the model of each worker in the range."""
    rows = ReplicaSample.objects.filter(sampled_at__gte=query.start, sampled_at__lt=query.end)
    if query.model:
        rows = rows.filter(model=query.model)
    return dict(rows.order_by("worker").values_list("worker", "model").distinct())


def _now() -> Mapping[str, ReplicaStatus]:
    """Return the replica of each worker that sends heartbeats."""
    try:
        board = read_fleet_status()
    except redis.RedisError:
        return {}
    return {replica.worker: replica for replica in board.replicas if replica.state != ReplicaState.SILENT}


def _chart(
    ctx: PageContext,
    query: FleetQuery,
    name: str,
    title: str,
    unit: Unit,
    read: Callable[[FleetPoint], int | None],
    drawn: Sequence[str],
    seen: Mapping[tuple[datetime, str], FleetPoint],
) -> Chart:
    at = tuple(query.start + i * query.bucket for i in range((query.end - query.start) // query.bucket))
    series = tuple(
        Series(
            worker,
            color,
            tuple(None if (model_cost := seen.get((when, worker))) is None else read(model_cost) for when in at),
        )
        for worker, color in zip(drawn, COLORS, strict=False)
    )
    return Chart(name, f"{title}; {query.label}", at, series, unit, bucket="hour", zone=ctx.zone, height=214)


def _cost(of: ModelCost) -> dict[str, Any]:
    cost, price = of.cost_per_million, of.price_per_million
    tenths = of.machine_minutes * 10 // 60
    margin = None if cost is None or not price else Margin(price, cost)
    return {"cost": of, "hours": f"{tenths // 10:,}.{tenths % 10}", "margin": margin}


def _minutes(bucket: timedelta) -> str:
    minutes = bucket // MINUTE
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours"


def _url(name: str, model: str) -> str:
    return with_query("", span="" if name == DEFAULT_RANGE else name, model=model) or "?"
