"""Prometheus metrics of the replicas, from their heartbeats and from the metrics that they write to Valkey.

The names are the engine's (see `inference_worker.contract.metric_families`). Metrics with vLLM's names have vLLM's
labels, with the replica as the engine, so that dashboards made for vLLM work. Millrace's metrics have own labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from inference_worker.contract import metric_families as families
from inference_worker.contract.messages import Heartbeat, metrics_key, read_metrics
from inference_worker.contract.metric_families import Family, MetricsSnapshot
from millrace.gateway.dispatch.replicas import ReplicaRegistry

SNAPSHOTS_PER_READ = 64  # so that other tasks run between reads
_Read = Callable[[Heartbeat], float]
STATE: tuple[tuple[Family, _Read], ...] = (  # families that are read from the heartbeat itself
    (Family("vllm:num_requests_running", "requests in the engine's batch"), lambda heartbeat: heartbeat.running),
    (
        Family("vllm:num_requests_waiting", "requests claimed and not yet scheduled, including preempted requests"),
        lambda heartbeat: heartbeat.waiting,
    ),
    (
        Family("vllm:kv_cache_usage_perc", "share of the KV cache's blocks that running requests use, from 0 to 1"),
        lambda heartbeat: heartbeat.kv_blocks_used / heartbeat.kv_blocks if heartbeat.kv_blocks else 0.0,
    ),
    (Family("millrace_kv_blocks", "blocks of the KV cache"), lambda heartbeat: heartbeat.kv_blocks),
    (
        Family("millrace_kv_blocks_used", "blocks of the KV cache used by running requests"),
        lambda heartbeat: heartbeat.kv_blocks_used,
    ),
    (
        Family("millrace_max_num_seqs", "maximum number of requests in one step"),
        lambda heartbeat: heartbeat.max_num_seqs,
    ),
)


@dataclass(frozen=True)
class _Source:
    """One replica at the time of a scrape."""

    replica_id: str
    heartbeat: Heartbeat
    metrics: MetricsSnapshot | None

    @property
    def labels(self) -> list[str]:
        return [self.heartbeat.model, self.replica_id]


class ReplicaMetrics:
    """A Prometheus collector of the live replicas, as they were at the last `update`. Any thread may collect."""

    def __init__(self, registry: ReplicaRegistry) -> None:
        self._registry = registry
        self._sources: tuple[_Source, ...] = ()

    def update(self, snapshots: Mapping[str, MetricsSnapshot]) -> None:
        """Replace the replicas by those that are live now, with their metrics by replica ID."""
        self._sources = tuple(
            _Source(replica_id, heartbeat, snapshots.get(replica_id, heartbeat.metrics))
            for replica_id, heartbeat in self._registry.live().items()
        )

    def collect(self) -> Iterable[Metric]:
        sources = self._sources
        for family, read in STATE:
            gauge = GaugeMetricFamily(family.name, family.help, labels=_labels(family))
            for source in sources:
                gauge.add_metric(source.labels, read(source.heartbeat))
            yield gauge
        for family in families.GAUGES:
            yield _gauge(family, sources)
        for family in families.COUNTERS:
            yield _counter(family, sources)
        for family in families.HISTOGRAMS:
            yield _histogram(family, sources)


async def read_snapshots(broker: redis.Redis, replica_ids: Sequence[str]) -> dict[str, MetricsSnapshot]:
    """Return the metrics of the replicas that have written some to Valkey, by replica ID.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    found: dict[str, MetricsSnapshot] = {}
    for start in range(0, len(replica_ids), SNAPSHOTS_PER_READ):
        part = replica_ids[start : start + SNAPSHOTS_PER_READ]
        payloads: Any = await broker.mget([metrics_key(replica_id) for replica_id in part])
        for replica_id, payload in zip(part, payloads, strict=True):
            if (metrics := read_metrics(payload)) is not None:
                found[replica_id] = metrics
    return found


def _labels(family: Family) -> list[str]:
    labels = ["model_name", "engine"] if family.name.startswith("vllm:") else ["model", "replica"]
    return [*labels, family.label] if family.label else labels


def _gauge(family: Family, sources: Iterable[_Source]) -> Metric:
    gauge = GaugeMetricFamily(family.name, family.help, labels=_labels(family))
    for source in sources:
        if source.metrics is not None and family.name in source.metrics.gauges:
            gauge.add_metric(source.labels, source.metrics.gauges[family.name])
    return gauge


def _counter(family: Family, sources: Iterable[_Source]) -> Metric:
    counter = CounterMetricFamily(family.name, family.help, labels=_labels(family))
    for source in sources:
        counts = source.metrics.counters.get(family.name, {}) if source.metrics is not None else {}
        for label, value in counts.items():
            counter.add_metric([*source.labels, label] if family.label else source.labels, value)
    return counter


def _histogram(family: Family, sources: Iterable[_Source]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=_labels(family))
    bounds = [*map(floatToGoString, family.buckets), "+Inf"]
    for source in sources:
        histogram = source.metrics.histograms.get(family.name) if source.metrics is not None else None
        # A worker of another version may use other buckets. Its histogram is omitted.
        if histogram is not None and len(histogram.counts) == len(bounds):
            buckets = list(zip(bounds, histogram.cumulative(), strict=True))
            metric.add_metric(source.labels, buckets, histogram.sum)
    return metric
