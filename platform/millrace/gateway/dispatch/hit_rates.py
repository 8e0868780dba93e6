"""Predicted and real cache hit rates of replicas, as one gateway sees them.

If prefix routing fails silently, such as by a digest that a worker does not update or by another hash, the predicted
rate is above the real one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from millrace.apps.deployments.gateway_heartbeat import HitRate

WINDOW_SECONDS = 600.0  # after it, a measurement has decayed to a third
MAX_REPLICAS = 1000  # the oldest are forgotten


@dataclass
class _Counts:
    model: str
    prompt: int = 0  # tokens since the start
    predicted: int = 0
    real: int = 0
    requests: float = 0.0  # decayed, as are the following
    recent_prompt: float = 0.0
    recent_difference: float = 0.0  # predicted minus real tokens
    at: float = 0.0


class HitRates:
    """Sums of the tokens of requests whose replica has a digest. It is also a Prometheus collector."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def record(
        self, replica_id: str, model: str, prompt: int, predicted: int, real: int, now: float | None = None
    ) -> None:
        """Record the tokens of a request: of its prompt, of its predicted and of its real cached part."""
        now = time.monotonic() if now is None else now
        counts = self._counts.setdefault(replica_id, _Counts(model, at=now))
        if len(self._counts) > MAX_REPLICAS:
            del self._counts[next(iter(self._counts))]
        factor = math.exp(-max(0.0, now - counts.at) / WINDOW_SECONDS)
        counts.at = now
        counts.prompt, counts.predicted, counts.real = (
            counts.prompt + prompt,
            counts.predicted + predicted,
            counts.real + real,
        )
        counts.requests = counts.requests * factor + 1
        counts.recent_prompt = counts.recent_prompt * factor + prompt
        counts.recent_difference = counts.recent_difference * factor + predicted - real

    def recent(self, live: Iterable[str]) -> tuple[HitRate, ...]:
        """Return the recent differences of these replicas, for the gateway's heartbeat."""
        return tuple(
            HitRate(replica_id, counts.model, round(counts.requests), _difference(counts))
            for replica_id in live
            if (counts := self._counts.get(replica_id)) is not None
        )

    def collect(self) -> Iterable[Metric]:
        labels = ["model", "replica"]
        families = {
            "prompt": CounterMetricFamily(
                "millrace_prefix_prompt_tokens",
                "prompt tokens of requests with a predicted cache hit rate",
                labels=labels,
            ),
            "predicted": CounterMetricFamily(
                "millrace_prefix_predicted_tokens", "prompt tokens that were predicted to be cached", labels=labels
            ),
            "real": CounterMetricFamily(
                "millrace_prefix_cached_tokens", "prompt tokens that were read from the prefix cache", labels=labels
            ),
        }
        difference = GaugeMetricFamily(
            "millrace_prefix_hit_rate_difference",
            "predicted minus real cache hit rate of the last minutes, from -1 to 1",
            labels=labels,
        )
        for replica_id, counts in list(self._counts.items()):
            for name, family in families.items():
                family.add_metric([counts.model, replica_id], getattr(counts, name))
            difference.add_metric([counts.model, replica_id], _difference(counts))
        yield from families.values()
        yield difference


def _difference(counts: _Counts) -> float:
    return counts.recent_difference / counts.recent_prompt if counts.recent_prompt else 0.0
