"""What the page of the fleet shows, one view model a panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

import redis
from django.urls import reverse

from frontend.core.charts import Chart, Series, Unit, told
from frontend.core.date_ranges import DateRangeChoice
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from millrace.apps.operations.costs import ModelCost, costs
from millrace.apps.operations.fleet_status import ReplicaState, ReplicaStatus, read_fleet_status
from millrace.apps.operations.history import FleetPoint, span
from millrace.apps.operations.models import ReplicaSample
from millrace.conf.environment import platform_settings

DRAWN = 5  # workers in a chart: those that served most
COLORS = ("spend", "output", "cached", "written", "failed")
MINUTE = timedelta(minutes=1)
# What one may look at: its length, and that of one point in a chart.
SPANS: dict[str, tuple[str, timedelta, timedelta]] = {
    "1h": ("1 hour", timedelta(hours=1), 2 * MINUTE),
    "6h": ("6 hours", timedelta(hours=6), 10 * MINUTE),
    "24h": ("24 hours", timedelta(hours=24), 30 * MINUTE),
    "7d": ("7 days", timedelta(days=7), 240 * MINUTE),
}
DEFAULT = "6h"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class FleetQuery:
    """What the address asks for. `model`: empty for all."""

    name: str
    label: str
    start: datetime
    end: datetime
    bucket: timedelta
    model: str
    spans: tuple[DateRangeChoice, ...]
    models: tuple[DateRangeChoice, ...]


@dataclass(frozen=True)
class WorkerRow:
    """A worker in the span, and how it is now; shares in words."""

    worker: str
    model: str
    compute: str
    compute_part: int  # of 10,000
    cpu: str
    mfu: str
    batch: str
    max_batch: str
    kv_used: int
    kv_blocks: int
    waiting: str
    hits: str
    preemptions: int
    tokens: int


@dataclass(frozen=True)
class FleetWorkers:
    rows: tuple[WorkerRow, ...]


@dataclass(frozen=True)
class Drawing:
    title: str
    detail: str
    chart: Chart


@dataclass(frozen=True)
class FleetHistory:
    drawings: tuple[Drawing, ...]
    left_out: int  # workers that are in no chart


@dataclass(frozen=True)
class CostRow:
    model: str
    per_hour: Money | None
    hours: str
    served: int
    cost: Money | None  # a million tokens
    price: Money | None  # billed for a million
    margin: str
    good: bool
    set_url: str


@dataclass(frozen=True)
class Costs:
    rows: tuple[CostRow, ...]
    since: datetime
    is_unset: bool  # no machine's cost is known


def asked(visit: PageContext) -> FleetQuery:
    """Return the span and the model of the address; the usual ones for nonsense."""
    name = visit.query.get("span", DEFAULT)
    name = name if name in SPANS else DEFAULT
    known = [spec.name for spec in platform_settings().models]
    model = visit.query.get("model", "")
    model = model if model in known else ""
    label, length, bucket = SPANS[name]
    end = visit.now + bucket - (visit.now - _EPOCH) % bucket
    spans = tuple(DateRangeChoice(text, _address(one, model), one == name) for one, (text, _, _) in SPANS.items())
    models = tuple(DateRangeChoice(one or "All models", _address(name, one), one == model) for one in ("", *known))
    return FleetQuery(name, label, end - length, end, bucket, model, spans, models if len(known) > 1 else ())


def workers(visit: PageContext) -> FleetWorkers:
    wanted = asked(visit)
    models = _models(wanted)
    points = [one for one in span(wanted.start, wanted.end, wanted.end - wanted.start) if one.worker in models]
    now = _now()
    return FleetWorkers(tuple(_row(one, models[one.worker], now.get(one.worker)) for one in points))


def history(visit: PageContext) -> FleetHistory:
    wanted = asked(visit)
    models = _models(wanted)
    points = [one for one in span(wanted.start, wanted.end, wanted.bucket) if one.worker in models]
    served: dict[str, int] = {}
    for one in points:
        served[one.worker] = served.get(one.worker, 0) + one.tokens
    drawn = sorted(sorted(served, key=lambda worker: -served[worker])[:DRAWN])
    seen = {(one.at, one.worker): one for one in points}
    kinds: tuple[tuple[str, str, str, Unit, Callable[[FleetPoint], int | None]], ...] = (
        ("compute", "Compute use", "share of time in forward passes", "percent", lambda one: one.forward),
        ("batch", "Batch size", "requests per step, average", "decimal", lambda one: one.batch),
        ("memory", "KV cache use", "blocks held by running requests", "percent", lambda one: one.kv_used),
        ("queue", "Queue", "requests claimed and not started, maximum", "count", lambda one: one.waiting),
        ("hits", "Prefix-cache hits", "share of prompt tokens", "percent", lambda one: one.hits),
        ("tokens", "Tokens served", f"every {_minutes(wanted.bucket)}", "tokens", lambda one: one.tokens),
    )
    drawings = (
        Drawing(title, detail, _chart(visit, wanted, name, f"{title}, {detail}", unit, read, drawn, seen))
        for name, title, detail, unit, read in kinds
    )
    return FleetHistory(tuple(drawings) if drawn else (), max(0, len(served) - DRAWN))


def cost(visit: PageContext) -> Costs:
    wanted = asked(visit)
    found = [one for one in costs(wanted.start, wanted.end) if not wanted.model or one.model == wanted.model]
    since = wanted.start.replace(minute=0, second=0, microsecond=0)
    return Costs(tuple(_cost(one) for one in found), since, all(one.nano_per_hour is None for one in found))


def _models(wanted: FleetQuery) -> Mapping[str, str]:
    """Return the model of each worker seen in the span."""
    rows = ReplicaSample.objects.filter(sampled_at__gte=wanted.start, sampled_at__lt=wanted.end)
    if wanted.model:
        rows = rows.filter(model=wanted.model)
    return dict(rows.order_by("worker").values_list("worker", "model").distinct())


def _now() -> Mapping[str, ReplicaStatus]:
    """Each worker's replica that speaks."""
    try:
        board = read_fleet_status()
    except redis.RedisError:
        return {}
    return {one.worker: one for one in board.replicas if one.state != ReplicaState.SILENT}


def _row(one: FleetPoint, model: str, now: ReplicaStatus | None) -> WorkerRow:
    return WorkerRow(
        worker=one.worker,
        model=model,
        compute=told(one.forward, "percent"),
        compute_part=one.forward or 0,
        cpu=told(one.cpu, "percent"),
        mfu=told(one.mfu, "percent"),
        batch=told(one.batch, "decimal"),
        max_batch="" if now is None else f"of {now.beat.max_num_seqs}",
        kv_used=0 if now is None else now.beat.kv_blocks_used,
        kv_blocks=0 if now is None else now.beat.kv_blocks,
        waiting="–" if now is None else str(now.beat.waiting),
        hits=told(one.hits, "percent"),
        preemptions=one.preemptions,
        tokens=one.tokens,
    )


def _chart(
    visit: PageContext,
    wanted: FleetQuery,
    name: str,
    title: str,
    unit: Unit,
    read: Callable[[FleetPoint], int | None],
    drawn: Sequence[str],
    seen: Mapping[tuple[datetime, str], FleetPoint],
) -> Chart:
    at = tuple(wanted.start + i * wanted.bucket for i in range((wanted.end - wanted.start) // wanted.bucket))
    series = tuple(
        Series(worker, color, tuple(None if (one := seen.get((when, worker))) is None else read(one) for when in at))
        for worker, color in zip(drawn, COLORS, strict=False)
    )
    return Chart(name, f"{title}; {wanted.label}", at, series, unit, bucket="hour", zone=visit.zone, height=214)


def _cost(one: ModelCost) -> CostRow:
    cost, price = one.cost_per_million, one.price_per_million
    margin = None if cost is None or not price else (price - cost) * 10_000 // price
    tenths = one.machine_minutes * 10 // 60
    return CostRow(
        model=one.model,
        per_hour=None if one.nano_per_hour is None else Money.nano(one.nano_per_hour),
        hours=f"{tenths // 10:,}.{tenths % 10}",
        served=one.served,
        cost=None if cost is None else Money(cost),
        price=None if price is None else Money(price),
        margin="–" if margin is None else _signed(margin),
        good=margin is not None and margin >= 0,
        set_url=reverse("operator-fleet-cost", args=[one.model]),
    )


def _signed(hundredths: int) -> str:
    """Return a share of the price; what loses very much is not told to the digit."""
    if hundredths < -99_900:
        return f"−{-hundredths // 100:,}%"
    tenths = abs(hundredths) // 10
    return f"{'−' if hundredths < 0 else ''}{tenths // 10}.{tenths % 10}%"


def _minutes(bucket: timedelta) -> str:
    minutes = bucket // MINUTE
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours"


def _address(name: str, model: str) -> str:
    chosen = ({} if name == DEFAULT else {"span": name}) | ({"model": model} if model else {})
    return f"?{urlencode(chosen)}"
