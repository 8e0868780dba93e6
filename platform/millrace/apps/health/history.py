"""Samples of replicas, one per minute, and their aggregation. Counters count from a replica's start, so the aggregation
uses differences of consecutive samples. A restarted worker is a new replica, whose figures are added to those of its
name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any

from django.db import connection

from inference_worker.contract import metric_families as families
from inference_worker.contract.metric_families import MetricsSnapshot
from millrace.apps.deployments.fleet_status import FleetStatus, ReplicaState, ReplicaStatus
from millrace.apps.health.models import ReplicaSample
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

RETENTION = timedelta(days=7)
_TTFT_BOUNDS = next(family.buckets for family in families.HISTOGRAMS if family.name == families.TTFT)
# All figures are integers: shares in hundredths of a percent, batch sizes in hundredths of a request.
_SPAN = """
WITH seen AS (
    SELECT date_bin(%(bucket)s, sampled_at, %(start)s) AS bucket, sampled_at, worker, model, waiting,
        worker || '.' || split_part(substr(replica_id, length(worker) + 2), '-', 1) AS process,
        kv_blocks, kv_blocks_used, cores, mfu,
        extract(epoch FROM sampled_at - lag(sampled_at) OVER w) * 1000 AS ms,
        cpu_ms - lag(cpu_ms) OVER w AS cpu, forward_ms - lag(forward_ms) OVER w AS forward,
        steps - lag(steps) OVER w AS steps, batched_sequences - lag(batched_sequences) OVER w AS batched,
        prompt_tokens + generation_tokens - lag(prompt_tokens + generation_tokens) OVER w AS tokens,
        cache_queries - lag(cache_queries) OVER w AS queries, cache_hits - lag(cache_hits) OVER w AS hits,
        preemptions - lag(preemptions) OVER w AS preemptions
    FROM operations_replicasample WHERE sampled_at >= %(start)s AND sampled_at < %(end)s
    WINDOW w AS (PARTITION BY replica_id ORDER BY sampled_at)
)
SELECT bucket, worker, shared_process, model, max(waiting), 10000 * sum(kv_blocks_used) / nullif(sum(kv_blocks), 0),
    round(10000 * sum(forward) / nullif(sum(ms), 0)), round(10000 * sum(cpu) / nullif(sum(ms * cores), 0)),
    100 * sum(batched) / nullif(sum(steps), 0), 10000 * sum(hits) / nullif(sum(queries), 0),
    coalesce(sum(preemptions), 0), coalesce(sum(tokens), 0), round(avg(mfu)),
    count(DISTINCT (sampled_at, process))
FROM (SELECT *, CASE WHEN process = ANY(%(processes)s) THEN process ELSE '' END AS shared_process FROM seen) AS seen
GROUP BY bucket, worker, shared_process, model ORDER BY bucket, worker, shared_process, model
"""


@dataclass(frozen=True)
class FleetPoint:
    """The aggregated samples of a worker's replicas of one model in a time bucket.

    Shares are in hundredths of a percent; None: unknown.
    """

    at: datetime
    worker: str
    process: str  # ID of the worker's process, if running workers share the name; empty: of all its other processes
    model: str
    waiting: int  # maximum
    kv_used: int | None
    forward: int | None  # share of time in forward passes
    cpu: int | None  # share of all cores
    batch: int | None  # hundredths of a request
    hits: int | None
    preemptions: int
    tokens: int  # tokens of prompts, cached ones included, and generated tokens
    mfu: int | None
    minutes: int  # number of minutes with a sample, of all processes


def sample(board: FleetStatus, now: datetime | None = None) -> int:
    """Store a sample of each running replica, at most one per minute. Returns the number of new samples.

    A loaded replica whose metrics Valkey has lost has no sample: its counters would seem to start again.
    """
    at = (now or datetime.now(UTC)).replace(second=0, microsecond=0)
    running = (replica for replica in board.replicas if replica.state != ReplicaState.SILENT)
    rows = [_row(at, replica) for replica in running if replica.metrics is not None or replica.beat.machine is None]
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        before = ReplicaSample.objects.filter(sampled_at=at).count()
        ReplicaSample.objects.bulk_create(rows, ignore_conflicts=True)
        return ReplicaSample.objects.filter(sampled_at=at).count() - before


def purge_expired(now: datetime | None = None) -> int:
    """Remove old samples. Returns their number."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        return ReplicaSample.objects.filter(sampled_at__lt=(now or datetime.now(UTC)) - RETENTION).delete()[0]


def span(start: datetime, end: datetime, bucket: timedelta, processes: Iterable[str] = ()) -> list[FleetPoint]:
    """Return the points of each worker, model and bucket from `start`, oldest first; inside `all_tenants_scope(…)`.

    Args:
        processes: IDs of processes whose points are not added to those of their worker's name.
    """
    with connection.cursor() as cursor:
        parameters: dict[str, Any] = {"start": start, "end": end, "bucket": bucket, "processes": list(processes)}
        cursor.execute(_SPAN, parameters)
        return [_read_point(row) for row in cursor.fetchall()]


def _read_point(row: Sequence[Any]) -> FleetPoint:
    at, worker, process, model, waiting, *shares, preemptions, tokens, mfu, minutes = row
    kv_used, forward, cpu, batch, hits = map(_read_integer, shares)
    return FleetPoint(
        at=at.astimezone(UTC),
        worker=worker,
        process=process,
        model=model,
        waiting=int(waiting),
        kv_used=kv_used,
        forward=forward,
        cpu=cpu,
        batch=batch,
        hits=hits,
        preemptions=int(preemptions),
        tokens=int(tokens),
        mfu=_read_integer(mfu),
        minutes=int(minutes),
    )


def _read_integer(value: Any) -> int | None:
    return None if value is None else int(value)


def ttft_p95(replicas: Sequence[ReplicaStatus], since: datetime) -> dict[str, int]:
    """Return the 95th percentile of the engine's time to the first token in microseconds, by replica ID.

    It covers the requests since `since`, or since the replica's start if that is later. Replicas without requests are
    omitted. Call it inside `all_tenants_scope(…)`.
    """
    ids = [replica.id for replica in replicas]
    rows = ReplicaSample.objects.filter(sampled_at__gte=since, replica_id__in=ids).order_by("replica_id", "sampled_at")
    first = {
        row.replica_id: row
        for row in rows.distinct("replica_id").only("replica_id", "sampled_at", "ttft", "heartbeat_at")
    }
    quantiles = {}
    for replica in replicas:
        counts = _ttft(replica.metrics)
        base = first.get(replica.id)
        if base is not None and len(base.ttft) == len(counts):
            counts = [count - before for count, before in zip(counts, base.ttft, strict=True)]
        quantile = _quantile(counts)
        if quantile is not None:
            quantiles[replica.id] = quantile
    return quantiles


def _quantile(counts: Sequence[int], percent: int = 95) -> int | None:
    """Return a percentile, interpolated in its bucket, like Prometheus; the last bucket counts as its start."""
    cumulative = list(accumulate(counts))
    if not cumulative or cumulative[-1] <= 0:
        return None
    rank = cumulative[-1] * percent
    index = bisect_right([count * 100 for count in cumulative], rank - 1)
    bounds = [round(bound * 1_000_000) for bound in _TTFT_BOUNDS]
    if index >= len(bounds):
        return bounds[-1]
    low = bounds[index - 1] if index else 0
    below = cumulative[index - 1] if index else 0
    return low + (bounds[index] - low) * (rank - below * 100) // (counts[index] * 100)


def _row(at: datetime, replica: ReplicaStatus) -> ReplicaSample:
    beat, metrics, machine = replica.beat, replica.metrics, replica.beat.machine
    seconds = 0.0 if metrics is None else sum(metrics.counters.get(families.FORWARD_SECONDS, {}).values())
    iterations = None if metrics is None else metrics.histograms.get(families.ITERATION_TOKENS)
    mfu = None if metrics is None else metrics.gauges.get(families.MFU)
    return ReplicaSample(
        sampled_at=at,
        replica_id=replica.id,
        worker=replica.worker,
        model=beat.model,
        heartbeat_at=beat.beat,
        running=beat.running,
        waiting=beat.waiting,
        max_num_seqs=beat.max_num_seqs,
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
    histogram = None if metrics is None else metrics.histograms.get(families.TTFT)
    return [] if histogram is None or len(histogram.counts) != len(_TTFT_BOUNDS) + 1 else list(histogram.counts)


def _count(metrics: MetricsSnapshot | None, name: str) -> int:
    return 0 if metrics is None else round(sum(metrics.counters.get(name, {}).values()))
