"""The fleet page, one function for each panel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import redis
from django.utils.translation import gettext as _

from frontend.core.chart_marks import find_deployment_marks
from frontend.core.charts import Chart, Series, Unit
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import Choice, with_query
from frontend.core.numbers import Margin, Money, common_places, decimals
from frontend.core.page_context import PageContext
from frontend.core.screens import SearchResult
from inference_worker.contract.messages import process_of
from millrace.apps.deployments.fleet_status import FleetStatus, ReplicaState, ReplicaStatus, read_fleet_status
from millrace.apps.deployments.served_deployments import served_specs
from millrace.apps.health.costs import ModelCost, costs
from millrace.apps.health.history import FleetPoint, span

CHARTS = 5
COLORS = ("spend", "output", "cached", "written", "failed")
MINUTE = timedelta(minutes=1)
WHOLE = 10_000  # hundredths of a percent
# Selectable ranges: total length, and length of one point.
RANGES: dict[str, tuple[str, timedelta, timedelta]] = {
    "1h": (_lazy("1 hour"), timedelta(hours=1), 2 * MINUTE),
    "6h": (_lazy("6 hours"), timedelta(hours=6), 10 * MINUTE),
    "24h": (_lazy("24 hours"), timedelta(hours=24), 30 * MINUTE),
    "7d": (_lazy("7 days"), timedelta(days=7), 240 * MINUTE),
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
    spans = tuple(Choice(text, _url(option, model), option == name) for option, (text, *_rest) in RANGES.items())
    models = tuple(Choice(option or _("All models"), _url(name, option), option == model) for option in ("", *known))
    return FleetQuery(name, label, end - length, end, bucket, model, spans, models if len(known) > 1 else ())


def workers(ctx: PageContext) -> list[dict[str, Any]]:
    """Return the workers in the selected range with their models and their current state."""
    query, board = query_of(ctx), _board()
    shared = _label_namesakes(board)
    now = _now(board, shared)
    return [
        {
            "point": point,
            "name": shared.get(point.process, point.worker),
            "model": point.model,
            "now": now.get((point.process or point.worker, point.model)),
            # More than the whole means that the measured peak of the machine is too low.
            "is_mfu_known": point.mfu is not None and point.mfu <= WHOLE,
        }
        for point in _points(query, query.end - query.start, shared)
    ]


def history(ctx: PageContext) -> dict[str, Any]:
    """Return the charts of the busiest workers, and the number of workers without a chart."""
    query = query_of(ctx)
    shared = _label_namesakes(_board())
    points = [(point, shared.get(point.process, point.worker)) for point in _points(query, query.bucket, shared)]
    pairs = {(worker, point.model) for point, worker in points}
    several = {worker for worker, count in Counter(worker for worker, _model in pairs).items() if count > 1}
    names = {pair: " · ".join(pair) if pair[0] in several else pair[0] for pair in pairs}
    served: dict[str, int] = {}
    for point, worker in points:
        name = names[worker, point.model]
        served[name] = served.get(name, 0) + point.tokens
    drawn = sorted(sorted(served, key=lambda name: -served[name])[:CHARTS])
    seen = {(point.at, names[worker, point.model]): point for point, worker in points}
    kinds: tuple[tuple[str, str, str, Unit, Callable[[FleetPoint], int | None]], ...] = (
        (
            "compute",
            _("Compute use"),
            _("share of time in forward passes"),
            "percent",
            lambda point: _millionths(point.forward),
        ),
        ("batch", _("Batch size"), _("requests per step, average"), "decimal", lambda point: point.batch),
        (
            "memory",
            _("KV cache use"),
            _("blocks held by running requests"),
            "percent",
            lambda point: _millionths(point.kv_used),
        ),
        ("queue", _("Queue"), _("requests claimed and not started, maximum"), "count", lambda point: point.waiting),
        ("hits", _("Prefix-cache hits"), _("share of prompt tokens"), "percent", lambda point: _millionths(point.hits)),
        (
            "tokens",
            _("Tokens served"),
            _("every %(minutes)s") % {"minutes": _minutes(query.bucket)},
            "tokens",
            lambda point: point.tokens,
        ),
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
        "hour_places": common_places(Money.nano(cost.nano_per_hour or 0) for cost in found),
        "places": common_places(
            Money(amount or 0) for cost in found for amount in (cost.cost_per_million, cost.price_per_million)
        ),
        "since": query.start.replace(minute=0, second=0, microsecond=0),
        "is_unset": all(cost.nano_per_hour is None for cost in found),
    }


def _points(query: FleetQuery, bucket: timedelta, processes: Iterable[str]) -> list[FleetPoint]:
    """Return the points of the selected range and model, those of these processes apart."""
    return [point for point in span(query.start, query.end, bucket, processes) if query.model in ("", point.model)]


def _board() -> FleetStatus | None:
    """Return the replicas and their workers, or None if Valkey cannot be reached."""
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def _label_namesakes(board: FleetStatus | None) -> Mapping[str, str]:
    """Return the labels of running workers that share their name, by process: the name with the machine."""
    found: dict[str, str] = {}
    if board is None:
        return found
    for name, workers in board.find_namesakes().items():
        hosts = Counter(worker.host for worker in workers)
        for worker in workers:
            is_unique = bool(worker.host) and hosts[worker.host] == 1
            found[worker.id] = f"{name} · {worker.host}" if is_unique else worker.id
    return found


def _now(board: FleetStatus | None, processes: Container[str]) -> Mapping[tuple[str, str], ReplicaStatus]:
    """Return a replica of each worker and model that sends heartbeats, preferably one that accepts requests.

    Args:
        processes: those that are the key of their replicas, instead of their worker.
    """
    replicas = () if board is None else board.replicas
    found = [replica for replica in replicas if replica.state != ReplicaState.SILENT]
    found.sort(key=lambda replica: replica.state == ReplicaState.READY)
    return {
        (process if (process := process_of(replica.id)) in processes else replica.worker, replica.beat.model): replica
        for replica in found
    }


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
            label,
            color,
            tuple(None if (point := seen.get((when, label))) is None else read(point) for when in at),
        )
        for label, color in zip(drawn, COLORS, strict=False)
    )
    marks = ctx.once("deployment marks", lambda: tuple(find_deployment_marks([(query.start, query.end)])))
    label = f"{title}; {query.label}"
    return Chart(name, label, at, series, unit, "hour", ctx.zone, height=214, step=query.bucket, marks=marks)


def _cost(of: ModelCost) -> dict[str, Any]:
    cost, price = of.cost_per_million, of.price_per_million
    margin = None if cost is None or not price else Margin(price, cost)
    return {"cost": of, "hours": decimals(of.machine_minutes / 60), "margin": margin}


def _millionths(hundredths: int | None) -> int | None:
    """Return a share in millionths of the whole, as charts show it, from hundredths of a percent."""
    return None if hundredths is None else hundredths * 100


def _minutes(bucket: timedelta) -> str:
    minutes = bucket // MINUTE
    return (
        _("%(minutes)s minutes") % {"minutes": minutes}
        if minutes < 60
        else _("%(minutes)s hours") % {"minutes": minutes // 60}
    )


def _url(name: str, model: str) -> str:
    return with_query("", span="" if name == DEFAULT_RANGE else name, model=model) or "?"


def find_models(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield served models by name."""
    for spec in served_specs():
        if typed.lower() in spec.name:
            yield SearchResult(spec.name, f"{ctx.url('operator-fleet')}?model={spec.name}", "models", "fleet")
