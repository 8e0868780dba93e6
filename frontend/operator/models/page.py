"""The models and workers page, one function for each panel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import redis
from django.conf import settings
from django.db import connection
from django.utils.translation import gettext as _

from billing.models import CompiledRateCard
from billing.rates.pricing import Component, Tier
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from inference_worker.checkpoints.encoder_config import ModelTask, model_task
from inference_worker.contract.settings import ModelSpec
from millrace.apps.deployments.fleet_status import FleetStatus, ReplicaState, ReplicaStatus, read_fleet_status
from millrace.apps.deployments.served_deployments import served_specs
from millrace.apps.health.history import ttft_p95
from millrace.apps.health.models import Cordon

HOUR = timedelta(hours=1)
_KINDS: Mapping[ModelTask, str] = {
    "generate": _lazy("Answers"),
    "embed": _lazy("Embeddings"),
    "rerank": _lazy("Rerank"),
}
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


def models(ctx: PageContext) -> dict[str, Any]:
    board = board_or_none()
    with connection.cursor() as cursor:
        cursor.execute(_TRAFFIC, [ctx.now - HOUR])
        traffic = {model: (number, p95) for model, number, p95 in cursor.fetchall()}
    prices = _prices(ctx.now)
    rows = [
        _model(spec, board) | {"prices": prices.get(spec.name, ()), "traffic": traffic.get(spec.name, (0, None))}
        for spec in served_specs()
    ]
    return {"rows": rows, "objective_ms": settings.MILLRACE.ttft_slo_ms}


def replicas(ctx: PageContext) -> dict[str, Any]:
    """Return the replicas of all models, and cordons of workers that do not run. No rows: Valkey is unavailable."""
    board = board_or_none()
    cordons = {row.worker: row for row in Cordon.objects.order_by("worker")}
    if board is None:
        return {"rows": None, "away": ()}
    p95 = ttft_p95(board.replicas, ctx.now - HOUR)
    running = {status.worker for status in board.replicas}
    rows = [_replica(status, cordons.get(status.worker), p95.get(status.id)) for status in board.replicas]
    return {"rows": rows, "away": [row for row in cordons.values() if row.worker not in running]}


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


def _model(spec: ModelSpec, board: FleetStatus | None) -> dict[str, Any]:
    own = [] if board is None else [status for status in board.replicas if status.beat.model == spec.name]
    machines = [status.beat.machine for status in own if status.beat.machine is not None]
    lengths = [machine.max_model_len for machine in machines]
    return {
        "spec": spec,
        "context": min(lengths) if lengths else spec.max_model_len,
        "numbers": ", ".join(sorted({machine.dtype for machine in machines})) or spec.dtype,
        "kind": _KINDS[model_task(spec.source)],
        "ready": 0 if board is None else board.count_ready(spec.name),
        "replicas": len(own),
    }


def _prices(now: datetime) -> Mapping[str, tuple[tuple[str, Money], ...]]:
    """Return the list prices of input and output by model, for the shortest prompts at the start of the day."""
    rows = CompiledRateCard.objects.filter(tenant_id=None, tier=Tier.STANDARD, effective_from__lte=now)
    found = {}
    for row in rows.order_by("model", "-effective_from", "-pk").distinct("model"):
        rates = {rate.component: rate.nano_per_million for rate in reversed(row.decode().rates)}
        shown = ((Component.UNCACHED, _("input")), (Component.OUTPUT, _("output")))
        prices = tuple((label, Money.nano(rates[component])) for component, label in shown if component in rates)
        if prices:
            found[row.model] = prices
    return found


def _replica(status: ReplicaStatus, cordon: Cordon | None, p95: int | None) -> dict[str, Any]:
    beat, machine = status.beat, status.beat.machine
    device = (
        "–"
        if machine is None
        else _("%(cores)s cores") % {"cores": machine.cores}
        if machine.device == "cpu"
        else machine.device
    )
    return {
        "status": status,
        "beat": beat,
        "machine": machine,
        "cordon": cordon,
        "badge": _BADGES[status.state],
        "device": device,
        "kv_tokens": beat.kv_tokens,
        "p95_us": p95,
        "is_silent": status.state == ReplicaState.SILENT,
    }
