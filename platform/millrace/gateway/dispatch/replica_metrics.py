"""Prometheus metrics of the replicas, from their heartbeats.

The names are the engine's (see `inference_worker.contract.metric_families`). Metrics with vLLM's names have vLLM's
labels, with the replica as the engine, so that dashboards made for vLLM work. Millrace's metrics have own labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from inference_worker.contract import metric_families as families
from inference_worker.contract.messages import Heartbeat
from inference_worker.contract.metric_families import Family
from millrace.gateway.dispatch.replicas import ReplicaRegistry

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


class ReplicaMetrics:
    """A Prometheus collector of the live replicas' heartbeats."""

    def __init__(self, registry: ReplicaRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        live = self._registry.live()
        for family, read in STATE:
            gauge = GaugeMetricFamily(family.name, family.help, labels=_labels(family))
            for replica_id, heartbeat in live.items():
                gauge.add_metric([heartbeat.model, replica_id], read(heartbeat))
            yield gauge
        for family in families.GAUGES:
            yield _gauge(family, live)
        for family in families.COUNTERS:
            yield _counter(family, live)
        for family in families.HISTOGRAMS:
            yield _histogram(family, live)


def _labels(family: Family) -> list[str]:
    labels = ["model_name", "engine"] if family.name.startswith("vllm:") else ["model", "replica"]
    return [*labels, family.label] if family.label else labels


def _gauge(family: Family, live: dict[str, Heartbeat]) -> Metric:
    gauge = GaugeMetricFamily(family.name, family.help, labels=_labels(family))
    for replica_id, heartbeat in live.items():
        if heartbeat.metrics is not None and family.name in heartbeat.metrics.gauges:
            gauge.add_metric([heartbeat.model, replica_id], heartbeat.metrics.gauges[family.name])
    return gauge


def _counter(family: Family, live: dict[str, Heartbeat]) -> Metric:
    counter = CounterMetricFamily(family.name, family.help, labels=_labels(family))
    for replica_id, heartbeat in live.items():
        counts = heartbeat.metrics.counters.get(family.name, {}) if heartbeat.metrics is not None else {}
        for label, value in counts.items():
            counter.add_metric(
                [heartbeat.model, replica_id, label] if family.label else [heartbeat.model, replica_id], value
            )
    return counter


def _histogram(family: Family, live: dict[str, Heartbeat]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=_labels(family))
    bounds = [*map(floatToGoString, family.buckets), "+Inf"]
    for replica_id, heartbeat in live.items():
        histogram = heartbeat.metrics.histograms.get(family.name) if heartbeat.metrics is not None else None
        # A worker of another version may use other buckets. Its histogram is omitted.
        if histogram is not None and len(histogram.counts) == len(bounds):
            buckets = list(zip(bounds, histogram.cumulative(), strict=True))
            metric.add_metric([heartbeat.model, replica_id], buckets, histogram.sum)
    return metric
