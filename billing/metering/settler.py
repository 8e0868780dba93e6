"""The settler: moves usage events from the stream to the database, each exactly once.

A batch is read, committed, and only then acknowledged and deleted, because workers remove acknowledged usage from their
journals. After any failure, the messages stay pending with this consumer and are read again first. Several settlers may
run with different names. They share the stream, and take over the messages of a lost one.
Failovers of PostgreSQL are in timeline.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import django.db
import redis
import structlog
from django.db import connection

from billing.metering import status
from billing.metering.ingest import SettleResult, UsageMessage, settle
from billing.metering.partitions import ensure_partitions
from billing.metering.timeline import TimelineWatch
from billing.reservations import reservations
from inference_worker.contract.messages import USAGE_GROUP, USAGE_STREAM, encode

log = structlog.get_logger(__name__)

BATCH = 1000
BLOCK_MS = 1000  # limits how long a stop waits without messages
# Minimum time between small batches of a consumer. It delays rows under load, and limits commits: a batch of 30 events
# takes little more time than a batch of one.
PACE_SECONDS = 0.2
CLAIM_IDLE_MS = 30_000  # a consumer with messages pending for longer is lost or stuck
CLAIM_SECONDS = 10.0
REPORT_SECONDS = 1.0
PARTITIONS_SECONDS = 3600.0
FORGET_IDLE_MS = 3_600_000  # a consumer without pending messages and without a read for longer is removed
MAX_BACKOFF_SECONDS = 5.0


class Turns:
    """The turns of the settlers of a process: in each period one of them reports the status and reclaims leases."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._lock = threading.Lock()

    def take(self, now: float) -> bool:
        """Return whether the caller has the turn of this period."""
        with self._lock:
            if now < self._next_at:
                return False
            self._next_at = now + REPORT_SECONDS
            return True


class Settler:
    """A consumer of the usage stream. `run` returns once `stopping` is set and the current batch is done."""

    def __init__(
        self,
        broker: redis.Redis,
        *,
        consumer: str,
        stopping: threading.Event,
        batch: int = BATCH,
        claim_idle_ms: int = CLAIM_IDLE_MS,
        turns: Turns | None = None,
    ) -> None:
        self._broker = broker
        self._consumer = consumer
        self._stopping = stopping
        self._batch = batch
        self._claim_idle_ms = claim_idle_ms
        self._failures = 0  # consecutive
        self._turns = Turns() if turns is None else turns
        self._timeline = TimelineWatch(broker)
        self._claim_at = self._partitions_at = 0.0

    def run(self) -> None:
        """Settle until stopped, through any outage of the database or the broker."""
        log.info("settler_started", consumer=self._consumer)
        while not self._stopping.is_set():
            try:
                self._resume()
                while not self._stopping.is_set():
                    self._round()
            except (redis.RedisError, django.db.Error) as exc:  # also if the broker lost the group
                self._back_off(exc)
        connection.close()
        log.info("settler_stopped", consumer=self._consumer)

    def drain(self) -> int:
        """Settle the current messages of the stream. Return how many there were."""
        done = self._resume()
        while messages := self._read(">", block_ms=None):
            self._settle(messages)
            done += len(messages)
        return done

    def _resume(self) -> int:
        """Create the group, then settle messages left pending with this consumer."""
        self._make_group()
        self._timeline.observe()
        self._make_partitions()
        done, last = 0, "0"
        while messages := self._read(last, block_ms=None):
            self._settle(messages)
            done, last = done + len(messages), messages[-1].stream_id
        return done

    def _round(self) -> None:
        started = time.monotonic()
        messages = self._read(">", block_ms=BLOCK_MS)
        if messages:
            self._settle(messages)
        self._failures = 0
        if started >= self._claim_at:
            self._take_over()
            self._claim_at = started + CLAIM_SECONDS
        if started >= self._partitions_at:
            self._make_partitions()
        if self._turns.take(started):
            self._timeline.observe()
            self._reclaim(self._report())
        if 0 < len(messages) < self._batch:
            self._stopping.wait(max(0.0, started + PACE_SECONDS - time.monotonic()))

    def _settle(self, messages: list[UsageMessage]) -> None:
        """Commit, then acknowledge. NOTE: in this order, and the acknowledgement only after a successful commit.

        After a failover of PostgreSQL, settle again: the commit may be lost, and not every event is in a journal.
        """
        result = settle(messages)
        while self._timeline.observe():
            result = settle(messages)
        self._acknowledge([message.stream_id for message in messages], result)
        log.debug("settled", **vars(result))

    def _acknowledge(self, ids: list[str], result: SettleResult) -> None:
        pipe = self._broker.pipeline(transaction=True)
        pipe.xack(USAGE_STREAM, USAGE_GROUP, *ids)
        pipe.xdel(USAGE_STREAM, *ids)
        for name, count in vars(result).items():
            pipe.hincrby(status.TOTALS_KEY, name, count)
        pipe.execute()

    def _read(self, after: str, block_ms: int | None) -> list[UsageMessage]:
        """Read up to a batch of messages: new ones for `>`, else this consumer's pending ones after that id."""
        streams: dict[Any, Any] = {USAGE_STREAM: after}
        reply: Any = self._broker.xreadgroup(USAGE_GROUP, self._consumer, streams, count=self._batch, block=block_ms)
        return _messages(reply[0][1]) if reply else []

    def _take_over(self) -> None:
        """Settle the pending messages of lost consumers, and remove consumers that are long gone."""
        cursor: Any = "0-0"
        while not self._stopping.is_set():
            reply: Any = self._broker.xautoclaim(
                USAGE_STREAM, USAGE_GROUP, self._consumer, self._claim_idle_ms, cursor, count=self._batch
            )
            cursor = reply[0]
            if messages := _messages(reply[1]):
                log.warning("usage_messages_reclaimed", messages=len(messages))
                self._settle(messages)
            if cursor in (b"0-0", "0-0"):
                break
        for other in self._broker.xinfo_consumers(USAGE_STREAM, USAGE_GROUP):
            if other["name"] != self._consumer.encode() and not other["pending"] and other["idle"] > FORGET_IDLE_MS:
                self._broker.xgroup_delconsumer(USAGE_STREAM, USAGE_GROUP, other["name"])

    def _make_group(self) -> None:
        """Create the group at the stream's start if it is missing: at first, or after the broker lost its data."""
        try:
            self._broker.xgroup_create(USAGE_STREAM, USAGE_GROUP, id="0", mkstream=True)
            log.info("consumer_group_created")
        except redis.ResponseError as exc:
            if "BUSYGROUP" not in str(exc):
                raise

    def _make_partitions(self) -> None:
        made = ensure_partitions()
        self._partitions_at = time.monotonic() + PARTITIONS_SECONDS
        if made:
            log.info("partitions_created", names=made)

    def _reclaim(self, reported_ms: int) -> None:
        """Reclaim leases whose requests cannot run any more. All usage reported until then is settled."""
        if reclaimed := reservations.reclaim(datetime.fromtimestamp(reported_ms / 1000, UTC)):
            log.warning("leases_reclaimed", leases=reclaimed)

    def _report(self) -> int:
        """Report the status. Return the time in milliseconds until which all reported usage is settled."""
        pipe = self._broker.pipeline(transaction=False)
        pipe.time()
        pipe.xlen(USAGE_STREAM)
        pipe.xrange(USAGE_STREAM, count=1)
        pipe.hgetall(status.TOTALS_KEY)
        time_, backlog, oldest, totals = pipe.execute()
        now = _microseconds(time_)
        since = int(oldest[0][0].partition(b"-")[0]) if oldest else now // 1000
        report = status.SettlerStatus(
            at=now,
            consumer=self._consumer,
            settled=int(totals.get(b"settled", 0)),
            repeated=int(totals.get(b"repeated", 0)),
            quarantined=int(totals.get(b"quarantined", 0)),
            backlog=backlog,
            lag_ms=max(0, now // 1000 - since),
        )
        self._broker.set(status.STATUS_KEY, status.encode(report))
        return since

    def _back_off(self, error: Exception) -> None:
        """Wait longer after each consecutive error, with jitter."""
        self._failures += 1
        seconds = min(MAX_BACKOFF_SECONDS, 0.1 * 2 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)  # noqa: S311
        message = str(error).partition("\n")[0]
        log.warning("settler_retrying", error_type=type(error).__name__, error=message, retry_in=round(seconds, 2))
        connection.close()
        self._stopping.wait(seconds)


def _messages(entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> list[UsageMessage]:
    """Convert entries to messages. An entry that was deleted while pending has no fields. One without an event is kept
    complete, for the quarantine.
    """
    return [
        UsageMessage(stream_id.decode(), (fields.get(b"e") or encode(fields)) if fields else None)
        for stream_id, fields in entries
    ]


def _microseconds(time_: tuple[int, int]) -> int:
    return time_[0] * 1_000_000 + time_[1]
