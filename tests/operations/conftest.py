from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from inference_worker.contract import metric_families as families
from inference_worker.contract.messages import HEARTBEAT_TTL_MS, REPLICAS_KEY, Heartbeat, Machine, beat_key, encode
from inference_worker.contract.metric_families import HistogramSnapshot, MetricsSnapshot

MACHINE = Machine("0.1.0", "cpu", 4, "bfloat16", 8192, 32)


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    """The tests' Valkey, empty."""
    client = redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"])
    client.flushdb()
    yield client
    client.close()


def metrics(counters: dict[str, float] | None = None, ttft: dict[int, int] | None = None) -> MetricsSnapshot:
    """What an engine has counted: `ttft` by the histogram's bucket."""
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
        "metrics": metrics(),
        "machine": MACHINE,
    }
    return Heartbeat(**(fields | changes))


@pytest.fixture
def speak(broker: redis.Redis) -> Callable[..., None]:
    """A replica's heartbeat, so many milliseconds old."""

    def speak(replica_id: str, age_ms: int = 0, **changes: Any) -> None:
        broker.hset(REPLICAS_KEY, replica_id, encode(heartbeat(**changes)))
        broker.set(beat_key(replica_id), "", px=HEARTBEAT_TTL_MS - age_ms)

    return speak
