"""What the replicas say of themselves, as Prometheus metrics.

The names are the engine's own (see `inference_worker.contract.metric_families`). Those of vLLM have vLLM's labels, the
replica being the engine, so that dashboards made for it work; Millrace's have Millrace's.
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
STATE: tuple[tuple[Family, _Read], ...] = (  # of the heartbeat itself
    (Family("vllm:num_requests_running", "requests in the engine's batch"), lambda beat: beat.running),
    (Family("vllm:num_requests_waiting", "requests claimed and not yet scheduled"), lambda beat: beat.waiting),
    (
        Family("vllm:kv_cache_usage_perc", "share of the KV cache's blocks that running requests hold, from 0 to 1"),
        lambda beat: beat.kv_blocks_used / beat.kv_blocks if beat.kv_blocks else 0.0,
    ),
    (Family("millrace_kv_blocks", "blocks of the KV cache"), lambda beat: beat.kv_blocks),
    (Family("millrace_kv_blocks_used", "blocks held by running requests"), lambda beat: beat.kv_blocks_used),
    (Family("millrace_max_num_seqs", "most requests in one step of the engine"), lambda beat: beat.max_num_seqs),
)


class ReplicaMetrics:
    """A Prometheus collector of the live replicas' heartbeats."""

    def __init__(self, board: ReplicaRegistry) -> None:
        self._board = board

    def collect(self) -> Iterable[Metric]:
        live = self._board.live()
        for family, read in STATE:
            gauge = GaugeMetricFamily(family.name, family.help, labels=_labels(family))
            for replica_id, beat in live.items():
                gauge.add_metric([beat.model, replica_id], read(beat))
            yield gauge
        for family in families.GAUGES:
            yield _gauge(family, live)
        for family in families.COUNTERS:
            yield _counter(family, live)
        for family in families.HISTOGRAMS:
            yield _histogram(family, live)


def _labels(family: Family) -> list[str]:
    own = ["model_name", "engine"] if family.name.startswith("vllm:") else ["model", "replica"]
    return [*own, family.label] if family.label else own


def _gauge(family: Family, live: dict[str, Heartbeat]) -> Metric:
    gauge = GaugeMetricFamily(family.name, family.help, labels=_labels(family))
    for replica_id, beat in live.items():
        if beat.metrics is not None and family.name in beat.metrics.gauges:
            gauge.add_metric([beat.model, replica_id], beat.metrics.gauges[family.name])
    return gauge


def _counter(family: Family, live: dict[str, Heartbeat]) -> Metric:
    counter = CounterMetricFamily(family.name, family.help, labels=_labels(family))
    for replica_id, beat in live.items():
        counts = beat.metrics.counters.get(family.name, {}) if beat.metrics is not None else {}
        for label, value in counts.items():
            counter.add_metric([beat.model, replica_id, label] if family.label else [beat.model, replica_id], value)
    return counter


def _histogram(family: Family, live: dict[str, Heartbeat]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=_labels(family))
    bounds = [*map(floatToGoString, family.buckets), "+Inf"]
    for replica_id, beat in live.items():
        histogram = beat.metrics.histograms.get(family.name) if beat.metrics is not None else None
        # A worker of another version may have other buckets: then it has no such histogram, rather than a wrong one.
        if histogram is not None and len(histogram.counts) == len(bounds):
            buckets = list(zip(bounds, histogram.cumulative(), strict=True))
            metric.add_metric([beat.model, replica_id], buckets, histogram.sum)
    return metric
