"""A worker's publisher and the messages that it has written."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

from inference_worker.contract.journal import Journal
from inference_worker.contract.messages import (
    USAGE_STREAM,
    ExecutionUsage,
    decode_usage,
)
from inference_worker.contract.request import (
    RequestOutput,
    TokenCounts,
)
from inference_worker.worker.engine_client import ActiveJob, Delivery
from inference_worker.worker.publisher import Publisher

USAGE = TokenCounts(uncached=2, cache_read=1, output=2)


def new_publisher(
    broker: redis.Redis, journal: Journal, on_broken: Callable[[], None] = lambda: None, retention_seconds: int = 50
) -> Publisher:
    seconds = {"log_seconds": 100, "retention_seconds": retention_seconds}
    return Publisher(broker, journal, on_broken=on_broken, **seconds)


def last(live: ActiveJob, *ids: int) -> Delivery:
    text = "".join(f"<{i}>" for i in ids)
    return live, RequestOutput(live.engine_id, list(ids), text, finish_reason="stop", usage=USAGE)


def usage_events(broker: redis.Redis) -> list[ExecutionUsage]:
    return [decode_usage(fields[b"e"]) for _, fields in broker.xrange(USAGE_STREAM)]


def eventually(holds: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up_at, "it never came about"
        time.sleep(0.02)
