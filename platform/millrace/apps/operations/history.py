"""A row for each replica and minute, and what a span of them says. Counts since a replica's start become differences
of neighboring rows; a replica that was restarted is another one, of the same worker."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any

from django.db import connection

from inference_worker.contract import metric_families as families
from inference_worker.contract.metric_families import MetricsSnapshot
from millrace.apps.operations.fleet_status import FleetStatus, ReplicaState, ReplicaStatus
from millrace.apps.operations.models import ReplicaSample
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

RETENTION = timedelta(days=7)
_TTFT_BOUNDS = next(family.buckets for family in families.HISTOGRAMS if family.name == families.TTFT)
# Every figure as whole numbers: shares in hundredths of a percent, batches in hundredths of a request.
_SPAN = """
WITH seen AS (
    SELECT date_bin(%(bucket)s, sampled_at, %(start)s) AS bucket, worker, waiting, kv_blocks, kv_blocks_used,
        cores, mfu,
        extract(epoch FROM sampled_at - lag(sampled_at) OVER w) * 1000 AS ms,
        cpu_ms - lag(cpu_ms) OVER w AS cpu, forward_ms - lag(forward_ms) OVER w AS forward,
        steps - lag(steps) OVER w AS steps, batched_sequences - lag(batched_sequences) OVER w AS batched,
        prompt_tokens + generation_tokens - lag(prompt_tokens + generation_tokens) OVER w AS tokens,
        cache_queries - lag(cache_queries) OVER w AS queries, cache_hits - lag(cache_hits) OVER w AS hits,
        preemptions - lag(preemptions) OVER w AS preemptions
    FROM operations_replicasample WHERE sampled_at >= %(start)s AND sampled_at < %(end)s
    WINDOW w AS (PARTITION BY replica_id ORDER BY sampled_at)
)
SELECT bucket, worker, max(waiting), 10000 * sum(kv_blocks_used) / nullif(sum(kv_blocks), 0),
    round(10000 * sum(forward) / nullif(sum(ms), 0)), round(10000 * sum(cpu) / nullif(sum(ms * cores), 0)),
    100 * sum(batched) / nullif(sum(steps), 0), 10000 * sum(hits) / nullif(sum(queries), 0),
    coalesce(sum(preemptions), 0), coalesce(sum(tokens), 0), round(avg(mfu)), count(*)
FROM seen GROUP BY bucket, worker ORDER BY bucket, worker
"""


@dataclass(frozen=True)
class FleetPoint:
    """One worker during one bucket of time. Shares: hundredths of a percent; None: there was nothing to share."""

    at: datetime
    worker: str
    waiting: int  # the most seen
    kv_used: int | None
    forward: int | None  # of the time, spent in forward passes
    cpu: int | None  # of all its cores
    batch: int | None  # hundredths of a request
    hits: int | None
    preemptions: int
    tokens: int  # computed or read from the cache, and generated
    mfu: int | None
    minutes: int  # it was seen in


def sample(board: FleetStatus, now: datetime | None = None) -> int:
    """Write down how the live replicas are, once a minute however often it is called; returns how many were new."""
    at = (now or datetime.now(UTC)).replace(second=0, microsecond=0)
    rows = [_row(at, one) for one in board.replicas if one.state != ReplicaState.SILENT]
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        before = ReplicaSample.objects.filter(sampled_at=at).count()
        ReplicaSample.objects.bulk_create(rows, ignore_conflicts=True)
        return ReplicaSample.objects.filter(sampled_at=at).count() - before


def sweep(now: datetime | None = None) -> int:
    """Remove what is too old; returns how much."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        return ReplicaSample.objects.filter(sampled_at__lt=(now or datetime.now(UTC)) - RETENTION).delete()[0]


def span(start: datetime, end: datetime, bucket: timedelta) -> list[FleetPoint]:
    """Every worker in every bucket, from `start` on, that it was seen in; oldest first; inside
    `all_tenants_scope(…)`."""
    with connection.cursor() as cursor:
        asked: dict[str, Any] = {"start": start, "end": end, "bucket": bucket}
        cursor.execute(_SPAN, asked)
        return [
            FleetPoint(at.astimezone(UTC), worker, *(None if value is None else int(value) for value in values))  # type: ignore[arg-type]
            for at, worker, *values in cursor.fetchall()
        ]


def ttft_p95(replicas: Sequence[ReplicaStatus], since: datetime) -> dict[str, int]:
    """Return the engine's time to the first token that 95 of 100 requests stayed below, in microseconds, by replica:
    of those since then, or of all if that was before it started; inside `all_tenants_scope(…)`. Replicas without any
    are left out."""
    ids = [one.id for one in replicas]
    rows = ReplicaSample.objects.filter(sampled_at__gte=since, replica_id__in=ids).order_by("replica_id", "sampled_at")
    first = {
        row.replica_id: row
        for row in rows.distinct("replica_id").only("replica_id", "sampled_at", "ttft", "heartbeat_at")
    }
    found = {}
    for one in replicas:
        counts = _ttft(one.beat.metrics)
        base = first.get(one.id)
        if base is not None and len(base.ttft) == len(counts):
            counts = [count - before for count, before in zip(counts, base.ttft, strict=True)]
        quantile = _quantile(counts)
        if quantile is not None:
            found[one.id] = quantile
    return found


def _quantile(counts: Sequence[int], percent: int = 95) -> int | None:
    """By linear interpolation within its bucket, as Prometheus does it; the last bucket counts as its lower end."""
    cumulative = list(accumulate(counts))
    if not cumulative or cumulative[-1] <= 0:
        return None
    rank = cumulative[-1] * percent
    place = bisect_right([each * 100 for each in cumulative], rank - 1)
    bounds = [round(bound * 1_000_000) for bound in _TTFT_BOUNDS]
    if place >= len(bounds):
        return bounds[-1]
    low = bounds[place - 1] if place else 0
    below = cumulative[place - 1] if place else 0
    return low + (bounds[place] - low) * (rank - below * 100) // (counts[place] * 100)


def _row(at: datetime, one: ReplicaStatus) -> ReplicaSample:
    beat, metrics, machine = one.beat, one.beat.metrics, one.beat.machine
    seconds = 0.0 if metrics is None else sum(metrics.counters.get(families.FORWARD_SECONDS, {}).values())
    iterations = None if metrics is None else metrics.histograms.get(families.ITERATION_TOKENS)
    mfu = None if metrics is None else metrics.gauges.get(families.MFU)
    return ReplicaSample(
        sampled_at=at,
        replica_id=one.id,
        worker=one.worker,
        model=beat.model,
        heartbeat_at=beat.beat,
        running=beat.running,
        waiting=beat.waiting,
        max_num_seqs=beat.max_batch,
        kv_blocks=beat.kv_blocks,
        kv_blocks_used=beat.kv_blocks_used,
        cores=1 if machine is None else machine.cores,
        cpu_ms=round(beat.cpu_seconds * 1000),
        forward_ms=round(seconds * 1000),
        steps=0 if iterations is None else sum(iterations.counts),
        batched_sequences=_count(metrics, families.BATCHED_SEQUENCES),
        prompt_tokens=_count(metrics, families.PROMPT_TOKENS),
        generation_tokens=_count(metrics, families.GENERATION_TOKENS),
        cache_queries=_count(metrics, families.CACHE_QUERIES),
        cache_hits=_count(metrics, families.CACHE_HITS),
        preemptions=_count(metrics, families.PREEMPTIONS),
        mfu=None if mfu is None else round(mfu * 10_000),
        ttft=_ttft(metrics),
    )


def _ttft(metrics: MetricsSnapshot | None) -> list[int]:
    found = None if metrics is None else metrics.histograms.get(families.TTFT)
    return [] if found is None or len(found.counts) != len(_TTFT_BOUNDS) + 1 else list(found.counts)


def _count(metrics: MetricsSnapshot | None, name: str) -> int:
    return 0 if metrics is None else round(sum(metrics.counters.get(name, {}).values()))
