"""A worker's publisher and the messages that it has written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

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
from inference_worker.worker.publisher import Publisher, _OutputBatch

USAGE = TokenCounts(uncached=2, cache_read=1, output=2)


class ObservedPublisher(Publisher):
    """A publisher that records the executions whose last events it has written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ended: set[ActiveJob] = set()
        self._changed = threading.Condition()
        super().__init__(*args, **kwargs)

    def has_ended(self, live: ActiveJob, seconds: float = 60) -> bool:
        """Wait until the execution's last event is written. Return False if it is not written in time."""
        with self._changed:
            return self._changed.wait_for(lambda: live in self._ended, seconds)

    def _write(self, round_: _OutputBatch) -> None:
        super()._write(round_)
        with self._changed:
            self._ended |= {live for live, *_ in (*round_.ends, *round_.failures)} | set(round_.requeued)
            self._changed.notify_all()


def new_publisher(
    broker: redis.Redis, journal: Journal, on_broken: Callable[[], None] = lambda: None, retention_seconds: int = 50
) -> ObservedPublisher:
    seconds = {"log_seconds": 100, "retention_seconds": retention_seconds}
    return ObservedPublisher(broker, journal, on_broken=on_broken, **seconds)


def last(live: ActiveJob, *ids: int) -> Delivery:
    text = "".join(f"<{i}>" for i in ids)
    return live, RequestOutput(live.engine_id, list(ids), text, finish_reason="stop", usage=USAGE)


def usage_events(broker: redis.Redis) -> list[ExecutionUsage]:
    return [decode_usage(fields[b"e"]) for _, fields in broker.xrange(USAGE_STREAM)]
