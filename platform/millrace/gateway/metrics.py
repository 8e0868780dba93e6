"""What this gateway counts, and what the replicas say of themselves, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from billing import status
from inference_worker.protocol import Heartbeat
from millrace.gateway.replicas import ReplicaBoard

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

# Heartbeat field -> (metric, help); what only grows is a counter.
_GAUGES = {
    "running": ("requests_running", "requests in the engine's batch"),
    "waiting": ("requests_waiting", "requests claimed and not yet scheduled"),
    "kv_blocks": ("kv_blocks", "blocks of the KV cache"),
    "kv_blocks_used": ("kv_blocks_used", "blocks held by running requests"),
}
_COUNTERS = {
    "steps": ("engine_steps", "engine steps"),
    "batched_sequences": ("batched_sequences", "sequences in all steps; over engine_steps: the mean batch size"),
    "prompt_tokens": ("prompt_tokens", "prompt tokens of requests scheduled"),
    "cached_tokens": ("cached_tokens", "prompt tokens read from the prefix cache"),
    "output_tokens": ("generation_tokens", "tokens generated"),
    "preemptions": ("preemptions", "requests preempted"),
}


class GatewayMetrics:
    """One per gateway process, with a registry of its own."""

    def __init__(self, replicas: ReplicaBoard, settler: _SettlerStatus | None = None) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "millrace_requests", "requests answered", ["endpoint", "status"], registry=self.registry
        )
        self.in_flight = Gauge("millrace_requests_in_flight", "generations under way", registry=self.registry)
        self.time_to_first_token = Histogram(
            "millrace_time_to_first_token_seconds",
            "from the request's arrival to its first token",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "millrace_tokens", "tokens served, by billing class", ["model", "token_class"], registry=self.registry
        )
        self.registry.register(_Replicas(replicas))
        self.settler = settler or _SettlerStatus()
        self.registry.register(self.settler)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Replicas:
    """Exports the live replicas' heartbeats."""

    def __init__(self, board: ReplicaBoard) -> None:
        self._board = board

    def collect(self) -> Iterable[Metric]:
        live = self._board.live()
        for field, (name, text) in _GAUGES.items():
            yield _fill(GaugeMetricFamily(f"millrace_{name}", text, labels=["model", "replica"]), live, field)
        for field, (name, text) in _COUNTERS.items():
            yield _fill(CounterMetricFamily(f"millrace_{name}", text, labels=["model", "replica"]), live, field)


def _fill(metric: Metric, live: Mapping[str, Heartbeat], field: str) -> Metric:
    for replica_id, beat in live.items():
        metric.add_metric([beat.model, replica_id], getattr(beat, field))  # type: ignore[attr-defined]
    return metric


class _SettlerStatus:
    """What the settler last said of itself (see billing.settler); read from the broker at each scrape."""

    def __init__(self) -> None:
        self.status: status.SettlerStatus | None = None

    def collect(self) -> Iterable[Metric]:
        if self.status is None:
            return
        settled, backlog, lag = self.status.settled, self.status.backlog, self.status.lag_ms / 1000
        yield CounterMetricFamily("millrace_usage_events_settled", "usage events settled", value=settled)
        yield GaugeMetricFamily("millrace_settlement_backlog", "usage events not settled yet", value=backlog)
        yield GaugeMetricFamily("millrace_settlement_lag_seconds", "age of the oldest of them", value=lag)
