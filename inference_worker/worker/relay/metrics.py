"""The metrics of a relay: those of the engine's metrics that an upstream has too."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from inference_worker.contract import metric_families as families
from inference_worker.contract.metric_families import Histogram, MetricsSnapshot
from inference_worker.contract.request import TOKEN_CLASSES, RequestError, TokenCounts
from inference_worker.contract.upstream_limits import RateLimitState
from inference_worker.engine.engine import EngineStats
from inference_worker.worker.engine_client import ActiveJob, Outcome, Requeued
from inference_worker.worker.relay.circuit_breaker import CircuitBreaker

_FINISHED = {"length": "length", "cancelled": "abort"}  # vLLM's finish reasons; others are "stop"


class RelayMetrics:
    """The counters of one relay. Only the relay's thread writes; any thread may read."""

    def __init__(self) -> None:
        self._usage = TokenCounts()
        self._finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self._errors: Counter[str] = Counter()
        self._ttft, self._e2e = (
            Histogram(family.buckets) for family in families.HISTOGRAMS if family.name in (families.TTFT, families.E2E)
        )

    def record_end(self, live: ActiveJob, outcome: Outcome) -> None:
        """Count an execution that has ended."""
        if isinstance(outcome, Requeued):
            return
        if isinstance(outcome, RequestError):
            self._finished["error"] += 1
            self._errors[outcome.code] += 1
            return
        self._finished[_FINISHED.get(outcome.finish_reason or "", "stop")] += 1
        self._usage += outcome.usage or TokenCounts()
        if live.first_token_at is not None:
            self._ttft.observe(live.first_token_at - live.claimed_at)
        self._e2e.observe(time.monotonic() - live.claimed_at)

    def stats(self, running: int, waiting: int, held_back: int, breaker: CircuitBreaker) -> EngineStats:
        usage = self._usage
        return EngineStats(
            num_running=running,
            num_waiting=waiting,
            steps=0,
            batched_sequences=0,
            batched_tokens=0,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cache_read,
            output_tokens=usage.output,
            preemptions=0,
            kv_blocks=0,
            kv_blocks_used=0,
            kv_tokens=0,
            schedule_seconds=0.0,
            forward_seconds=0.0,
            output_seconds=0.0,
            held_back=held_back,
            circuit_open=breaker.is_open,
            tenants_paused=breaker.num_paused,
        )

    def snapshot(
        self, breaker: CircuitBreaker, waits: Mapping[str, int] | None = None, limits: RateLimitState | None = None
    ) -> MetricsSnapshot:
        """Return the metrics, with the waits and the rate limits of the deployment's credential if it has one."""
        usage = self._usage
        gauges = {
            families.UPSTREAM_CIRCUIT_OPEN: float(breaker.is_open),
            families.UPSTREAM_TENANTS_PAUSED: float(breaker.num_paused),
        }
        if limits is not None and limits.requests_left is not None:
            gauges[families.UPSTREAM_REQUESTS_LEFT] = float(limits.requests_left)
        if limits is not None and limits.tokens_left is not None:
            gauges[families.UPSTREAM_TOKENS_LEFT] = float(limits.tokens_left)
        return MetricsSnapshot(
            counters={
                families.PROMPT_TOKENS: {"": usage.prompt},
                families.GENERATION_TOKENS: {"": usage.output},
                families.CACHE_QUERIES: {"": usage.prompt},
                families.CACHE_HITS: {"": usage.cache_read},
                families.SUCCESS: dict(self._finished),
                families.REQUEST_ERRORS: dict(self._errors),
                families.UPSTREAM_WAITS: dict(waits or {}),
                families.BILLED_TOKENS: {name: getattr(usage, name) for name in TOKEN_CLASSES},
            },
            gauges=gauges,
            histograms={families.TTFT: self._ttft.snapshot(), families.E2E: self._e2e.snapshot()},
        )
