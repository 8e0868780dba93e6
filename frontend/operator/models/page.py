"""What the page of models and workers shows, one view model a panel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import redis
from django.db import connection
from django.urls import NoReverseMatch, reverse

from billing.models import CompiledRateCard
from billing.pricing.pricing import Component, Tier
from frontend.core.numbers import Money, duration
from frontend.core.page_context import PageContext
from inference_worker.contract.settings import ModelSpec
from millrace.apps.operations.fleet_status import FleetStatus, ReplicaState, ReplicaStatus, read_fleet_status
from millrace.apps.operations.history import ttft_p95
from millrace.apps.operations.models import Cordon
from millrace.conf.environment import platform_settings

HOUR = timedelta(hours=1)
_BADGES = {
    ReplicaState.READY: "good",
    ReplicaState.STARTING: "info",
    ReplicaState.CORDONED: "warn",
    ReplicaState.DRAINING: "warn",
    ReplicaState.DRAINED: "warn",
    ReplicaState.DISK_LOW: "bad",
    ReplicaState.SILENT: "bad",
}
_TRAFFIC = """
SELECT served_model, count(*), percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms)
FROM request_log_requestrecord WHERE started_at >= %s AND served_model <> '' GROUP BY served_model
"""


@dataclass(frozen=True)
class ModelRow:
    name: str
    source: str
    context: int | None  # tokens; None: no replica has said
    numbers: str  # that it computes in
    kind: str
    prices: tuple[tuple[str, Money], ...]  # of the list, USD a million tokens; empty: none is set
    ready: int
    replicas: int
    requests: int  # of the last hour
    p95: str
    late: bool
    fleet_url: str


@dataclass(frozen=True)
class OperatorModelList:
    rows: tuple[ModelRow, ...]
    prices_url: str
    objective: str


@dataclass(frozen=True)
class ReplicaRow:
    id: str
    worker: str
    model: str
    state: str
    badge: str
    why: str  # it is cordoned, by whom
    version: str
    device: str
    numbers: str
    kv_tokens: int | None  # that the KV cache holds
    kv_used: int
    kv_blocks: int
    running: int
    waiting: int
    max_batch: int
    age: str
    p95: str
    cordon_url: str  # empty: not to be done now
    drain_url: str
    uncordon_url: str


@dataclass(frozen=True)
class Away:
    """A cordon of a worker that does not run."""

    worker: str
    why: str
    since: datetime
    uncordon_url: str


@dataclass(frozen=True)
class Replicas:
    """None of the rows: the broker is away."""

    rows: tuple[ReplicaRow, ...] | None
    away: tuple[Away, ...]


@dataclass(frozen=True)
class Effect:
    """What would happen if a worker got no new work."""

    requests: int  # that it has
    model: str
    others: int  # replicas that would take its model's requests


def board_or_none() -> FleetStatus | None:
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def models(visit: PageContext) -> OperatorModelList:
    board = board_or_none()
    with connection.cursor() as cursor:
        cursor.execute(_TRAFFIC, [visit.now - HOUR])
        traffic = {model: (number, p95) for model, number, p95 in cursor.fetchall()}
    prices = _prices(visit.now)
    objective = platform_settings().ttft_slo_ms
    rows = (
        _model(spec, board, prices.get(spec.name, ()), *traffic.get(spec.name, (0, None)), objective)
        for spec in platform_settings().models
    )
    return OperatorModelList(tuple(rows), _address("operator-prices"), duration(objective * 1000))


def replicas(visit: PageContext) -> Replicas:
    board = board_or_none()
    cordons = {row.worker: row for row in Cordon.objects.order_by("worker")}
    if board is None:
        return Replicas(None, ())
    p95 = ttft_p95(board.replicas, visit.now - HOUR)
    running = {one.worker for one in board.replicas}
    away = (
        Away(row.worker, _why(row), row.cordoned_at, reverse("operator-models-uncordon", args=[row.worker]))
        for row in cordons.values()
        if row.worker not in running
    )
    rows = (_replica(one, cordons.get(one.worker), p95.get(one.id)) for one in board.replicas)
    return Replicas(tuple(rows), tuple(away))


def effect(worker: str) -> Effect | None:
    """None: no such worker runs."""
    board = board_or_none()
    mine = [] if board is None else [one for one in board.replicas if one.worker == worker]
    if board is None or not mine:
        return None
    model = mine[0].beat.model
    others = sum(
        one.worker != worker and one.state == ReplicaState.READY and one.beat.model == model for one in board.replicas
    )
    return Effect(sum(one.load for one in mine if one.state != ReplicaState.SILENT), model, others)


def _model(
    spec: ModelSpec,
    board: FleetStatus | None,
    prices: tuple[tuple[str, Money], ...],
    requests: int,
    p95_ms: int | None,
    objective: int,
) -> ModelRow:
    mine = [] if board is None else [one for one in board.replicas if one.beat.model == spec.name]
    machines = [one.beat.machine for one in mine if one.beat.machine is not None]
    lengths = {machine.max_model_len for machine in machines}
    return ModelRow(
        name=spec.name,
        source=spec.source,
        context=min(lengths) if lengths else spec.max_model_len,
        numbers=", ".join(sorted({machine.dtype for machine in machines})) or spec.dtype,
        kind="Embeddings" if mine and not any(one.beat.kv_blocks for one in mine) else "Answers" if mine else "–",
        prices=prices,
        ready=0 if board is None else board.ready(spec.name),
        replicas=len(mine),
        requests=requests,
        p95="–" if p95_ms is None else duration(p95_ms * 1000),
        late=p95_ms is not None and p95_ms > objective,
        fleet_url=f"{_address('operator-fleet')}?model={spec.name}",
    )


def _prices(now: datetime) -> Mapping[str, tuple[tuple[str, Money], ...]]:
    """Input and output on the list, by model: of the shortest prompts, at the start of the day."""
    rows = CompiledRateCard.objects.filter(tenant_id=None, tier=Tier.STANDARD, effective_from__lte=now)
    found = {}
    for row in rows.order_by("model", "-effective_from", "-pk").distinct("model"):
        rates = {rate.component: rate.nano_per_million for rate in reversed(row.decoded().rates)}
        shown = ((Component.UNCACHED, "in"), (Component.OUTPUT, "out"))
        prices = tuple((label, Money.nano(rates[component])) for component, label in shown if component in rates)
        if prices:
            found[row.model] = prices
    return found


def _replica(one: ReplicaStatus, cordon: Cordon | None, p95: int | None) -> ReplicaRow:
    beat, machine = one.beat, one.beat.machine
    alive = one.state != ReplicaState.SILENT
    drains = cordon is not None and cordon.drain

    def address(verb: str, *, shown: bool) -> str:
        return reverse(f"operator-models-{verb}", args=[one.worker]) if shown else ""

    return ReplicaRow(
        id=one.id,
        worker=one.worker,
        model=beat.model,
        state=one.state.value.capitalize(),
        badge=_BADGES[one.state],
        why="" if cordon is None else _why(cordon),
        version="–" if machine is None else machine.version,
        device="–" if machine is None else f"{machine.cores} cores" if machine.device == "cpu" else machine.device,
        numbers="" if machine is None else machine.dtype,
        kv_tokens=None if machine is None or not beat.kv_blocks else beat.kv_blocks * machine.block_size,
        kv_used=beat.kv_blocks_used,
        kv_blocks=beat.kv_blocks,
        running=beat.running,
        waiting=beat.waiting,
        max_batch=beat.max_num_seqs,
        age="Over a minute" if one.age_ms is None else duration(one.age_ms * 1000),
        p95="–" if p95 is None else duration(p95),
        cordon_url=address("cordon", shown=alive and cordon is None),
        drain_url=address("drain", shown=alive and not drains),
        uncordon_url=address("uncordon", shown=cordon is not None),
    )


def _why(cordon: Cordon) -> str:
    return f"{cordon.reason or 'No reason given'} · {cordon.cordoned_by}"


def _address(name: str) -> str:
    try:
        return reverse(name)
    except NoReverseMatch:
        return ""
