"""View models of the models and workers page, one for each panel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import redis
from django.conf import settings
from django.db import connection
from django.urls import reverse

from billing.models import CompiledRateCard
from billing.pricing.pricing import Component, Tier
from frontend.core.numbers import Money, duration
from frontend.core.page_context import PageContext
from inference_worker.contract.settings import ModelSpec
from millrace.apps.operations.fleet_status import FleetStatus, ReplicaState, ReplicaStatus, read_fleet_status
from millrace.apps.operations.history import ttft_p95
from millrace.apps.operations.models import Cordon

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
    context: int | None  # tokens; None if no replica has reported it
    numbers: str  # compute precision
    kind: str
    prices: tuple[tuple[str, Money], ...]  # list prices in USD per 1M tokens; empty without prices
    ready: int
    replicas: int
    requests: int  # in the last hour
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
    reason: str  # reason and user of the cordon
    version: str
    device: str
    numbers: str
    kv_tokens: int | None  # capacity of the KV cache
    kv_used: int
    kv_blocks: int
    running: int
    waiting: int
    max_batch: int
    age: str
    p95: str
    cordon_url: str  # empty if not possible
    drain_url: str
    uncordon_url: str


@dataclass(frozen=True)
class AwayWorker:
    """The cordon of a worker that does not run."""

    worker: str
    reason: str
    since: datetime
    uncordon_url: str


@dataclass(frozen=True)
class Replicas:
    """The replicas of all models. There are no rows if Valkey is unavailable."""

    rows: tuple[ReplicaRow, ...] | None
    away: tuple[AwayWorker, ...]


@dataclass(frozen=True)
class CordonEffect:
    """The effect of a cordon on running requests."""

    requests: int  # requests on the worker
    model: str
    others: int  # other available replicas of its model


def board_or_none() -> FleetStatus | None:
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def models(ctx: PageContext) -> OperatorModelList:
    board = board_or_none()
    with connection.cursor() as cursor:
        cursor.execute(_TRAFFIC, [ctx.now - HOUR])
        traffic = {model: (number, p95) for model, number, p95 in cursor.fetchall()}
    prices = _prices(ctx.now)
    objective = settings.MILLRACE.ttft_slo_ms
    rows = (
        _model(spec, board, prices.get(spec.name, ()), *traffic.get(spec.name, (0, None)), objective)
        for spec in settings.MILLRACE.models
    )
    return OperatorModelList(tuple(rows), reverse("operator-prices"), duration(objective * 1000))


def replicas(ctx: PageContext) -> Replicas:
    board = board_or_none()
    cordons = {row.worker: row for row in Cordon.objects.order_by("worker")}
    if board is None:
        return Replicas(None, ())
    p95 = ttft_p95(board.replicas, ctx.now - HOUR)
    running = {status.worker for status in board.replicas}
    away = (
        AwayWorker(
            row.worker, _cordon_reason(row), row.cordoned_at, reverse("operator-models-uncordon", args=[row.worker])
        )
        for row in cordons.values()
        if row.worker not in running
    )
    rows = (_replica(status, cordons.get(status.worker), p95.get(status.id)) for status in board.replicas)
    return Replicas(tuple(rows), tuple(away))


def effect(worker: str) -> CordonEffect | None:
    """Return the effect of a cordon; None if the worker does not run."""
    board = board_or_none()
    own_replicas = [] if board is None else [status for status in board.replicas if status.worker == worker]
    if board is None or not own_replicas:
        return None
    model = own_replicas[0].beat.model
    others = sum(
        status.worker != worker and status.state == ReplicaState.READY and status.beat.model == model
        for status in board.replicas
    )
    return CordonEffect(
        sum(status.load for status in own_replicas if status.state != ReplicaState.SILENT), model, others
    )


def _model(
    spec: ModelSpec,
    board: FleetStatus | None,
    prices: tuple[tuple[str, Money], ...],
    requests: int,
    p95_ms: int | None,
    objective: int,
) -> ModelRow:
    own_replicas = [] if board is None else [status for status in board.replicas if status.beat.model == spec.name]
    machines = [status.beat.machine for status in own_replicas if status.beat.machine is not None]
    lengths = {machine.max_model_len for machine in machines}
    return ModelRow(
        name=spec.name,
        source=spec.source,
        context=min(lengths) if lengths else spec.max_model_len,
        numbers=", ".join(sorted({machine.dtype for machine in machines})) or spec.dtype,
        kind="Embeddings"
        if own_replicas and not any(status.beat.kv_blocks for status in own_replicas)
        else "Answers"
        if own_replicas
        else "–",
        prices=prices,
        ready=0 if board is None else board.ready(spec.name),
        replicas=len(own_replicas),
        requests=requests,
        p95="–" if p95_ms is None else duration(p95_ms * 1000),
        late=p95_ms is not None and p95_ms > objective,
        fleet_url=f"{reverse('operator-fleet')}?model={spec.name}",
    )


def _prices(now: datetime) -> Mapping[str, tuple[tuple[str, Money], ...]]:
    """Return the list prices of input and output by model, for the shortest prompts at the start of the day."""
    rows = CompiledRateCard.objects.filter(tenant_id=None, tier=Tier.STANDARD, effective_from__lte=now)
    found = {}
    for row in rows.order_by("model", "-effective_from", "-pk").distinct("model"):
        rates = {rate.component: rate.nano_per_million for rate in reversed(row.decoded().rates)}
        shown = ((Component.UNCACHED, "in"), (Component.OUTPUT, "out"))
        prices = tuple((label, Money.nano(rates[component])) for component, label in shown if component in rates)
        if prices:
            found[row.model] = prices
    return found


def _replica(status: ReplicaStatus, cordon: Cordon | None, p95: int | None) -> ReplicaRow:
    beat, machine = status.beat, status.beat.machine
    alive = status.state != ReplicaState.SILENT
    drains = cordon is not None and cordon.drain

    def address(action: str, *, shown: bool) -> str:
        return reverse(f"operator-models-{action}", args=[status.worker]) if shown else ""

    return ReplicaRow(
        id=status.id,
        worker=status.worker,
        model=beat.model,
        state=status.state.value.capitalize(),
        badge=_BADGES[status.state],
        reason="" if cordon is None else _cordon_reason(cordon),
        version="–" if machine is None else machine.version,
        device="–" if machine is None else f"{machine.cores} cores" if machine.device == "cpu" else machine.device,
        numbers="" if machine is None else machine.dtype,
        kv_tokens=None if machine is None or not beat.kv_blocks else beat.kv_blocks * machine.block_size,
        kv_used=beat.kv_blocks_used,
        kv_blocks=beat.kv_blocks,
        running=beat.running,
        waiting=beat.waiting,
        max_batch=beat.max_num_seqs,
        age="Over a minute" if status.age_ms is None else duration(status.age_ms * 1000),
        p95="–" if p95 is None else duration(p95),
        cordon_url=address("cordon", shown=alive and cordon is None),
        drain_url=address("drain", shown=alive and not drains),
        uncordon_url=address("uncordon", shown=cordon is not None),
    )


def _cordon_reason(cordon: Cordon) -> str:
    return f"{cordon.reason or 'No reason given'} · {cordon.cordoned_by}"
