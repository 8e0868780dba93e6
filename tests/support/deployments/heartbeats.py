"""A replica's heartbeat and metrics for tests."""

from __future__ import annotations

import time
from typing import Any

import redis

from inference_worker.contract import metric_families as families
from inference_worker.contract.compute_support import describe_support
from inference_worker.contract.messages import SUPPORT_KEY, Heartbeat, Machine, WorkerSupport, encode
from inference_worker.contract.metric_families import HistogramSnapshot, MetricsSnapshot

MACHINE = Machine("0.1.0", "cpu", 4, "bfloat16", 8192, 32)


def metrics(counters: dict[str, float] | None = None, ttft: dict[int, int] | None = None) -> MetricsSnapshot:
    """Return an engine's counters; `ttft` is by the histogram's bucket."""
    bounds = next(family.buckets for family in families.HISTOGRAMS if family.name == families.TTFT)
    counts = [0] * (len(bounds) + 1)
    for bucket, number in (ttft or {}).items():
        counts[bucket] = number
    return MetricsSnapshot(
        {name: {"": value} for name, value in (counters or {}).items()},
        {families.MFU: 0.25},
        {families.TTFT: HistogramSnapshot(counts, 0.0)},
    )


def heartbeat(**changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {
        "beat": time.time_ns(),
        "model": "smollm2-135m",
        "ready": True,
        "draining": False,
        "running": 0,
        "waiting": 0,
        "max_num_seqs": 8,
        "kv_blocks": 100,
        "kv_blocks_used": 25,
        "kv_tokens": 3200,
        "metrics": metrics(),
        "machine": MACHINE,
    }
    return Heartbeat(**(fields | changes))


def register_worker(broker: redis.Redis, process_id: str, host: str) -> None:
    """Register the process of a worker, as its heartbeats do. A heartbeat of the process keeps it."""
    support = WorkerSupport(("default",), describe_support("cpu", "avx2", None), host, 1_700_000_000)
    broker.hset(SUPPORT_KEY, process_id, encode(support))
