"""The settler: moves usage events from the broker's stream into the database, each exactly once.

A batch is read, committed, and only then acknowledged and deleted: workers trim their journals by what is acknowledged.
Whatever breaks in between, the messages stay pending with this consumer and are read again first. Several settlers may
run, each under a name of its own; they share the stream, and take over what one that died had not finished.
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
from redis.backoff import NoBackoff
from redis.retry import Retry

from billing.budgets import reservations
from billing.metering import status
from billing.metering.ingest import SettleResult, UsageMessage, settle
from billing.metering.partitions import ensure_partitions
from inference_worker.contract.messages import USAGE_GROUP, USAGE_STREAM, encode

log = structlog.get_logger(__name__)

BATCH = 1000
BLOCK_MS = 500  # bounds how long a stop waits when nothing comes
PACE_SECONDS = 0.05  # least time from one small batch to the next: a row shows this late, and commits stay few
CLAIM_IDLE_MS = 30_000  # a consumer with messages that are pending for longer is dead or stuck
CLAIM_SECONDS = 10.0
REPORT_SECONDS = 1.0
PARTITIONS_SECONDS = 3600.0
FORGET_IDLE_MS = 3_600_000  # a consumer with nothing pending and no read for longer is removed
MAX_BACKOFF_SECONDS = 5.0


def connect(url: str) -> redis.Redis:
    """Return a connection to the broker that fails rather than repeats: a read done twice would leave messages
    pending."""
    return redis.Redis.from_url(
        url,
        socket_timeout=5,
        socket_connect_timeout=2,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=10,
        protocol=2,
    )


class Settler:
    """One consumer of the usage stream. `run` returns once `stopping` is set and the batch in hand is done."""

    def __init__(
        self,
        broker: redis.Redis,
        *,
        consumer: str,
        stopping: threading.Event,
        batch: int = BATCH,
        claim_idle_ms: int = CLAIM_IDLE_MS,
    ) -> None:
        self._broker = broker
        self._consumer = consumer
        self._stopping = stopping
        self._batch = batch
        self._claim_idle_ms = claim_idle_ms
        self._faults = 0  # in a row
        self._last_batch_at: int | None = None
        self._reap_at = self._report_at = self._claim_at = self._partitions_at = 0.0

    def run(self) -> None:
        """Settle until told to stop, through any outage of the database or the broker."""
        log.info("settler_started", consumer=self._consumer)
        while not self._stopping.is_set():
            try:
                self._resume()
                while not self._stopping.is_set():
                    self._round()
            except (redis.RedisError, django.db.Error) as exc:  # the broker having lost the group is one of these
                self._back_off(exc)
        connection.close()
        log.info("settler_stopped", consumer=self._consumer)

    def drain(self) -> int:
        """Settle what the stream holds now, and return how many messages that was."""
        done = self._resume()
        while messages := self._read(">", block_ms=None):
            self._settle(messages)
            done += len(messages)
        return done

    def _resume(self) -> int:
        """Make what is needed, then settle what an earlier run or a broken round left pending with this consumer."""
        self._make_group()
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
        self._faults = 0
        if started >= self._claim_at:
            self._take_over()
            self._claim_at = started + CLAIM_SECONDS
        if started >= self._partitions_at:
            self._make_partitions()
        if messages or started >= self._report_at:
            told = self._report()
            if started >= self._reap_at:
                self._reap(told)
                self._reap_at = started + REPORT_SECONDS
            self._report_at = started + REPORT_SECONDS
        if 0 < len(messages) < self._batch:
            self._stopping.wait(max(0.0, started + PACE_SECONDS - time.monotonic()))

    def _settle(self, messages: list[UsageMessage]) -> None:
        """Commit, then acknowledge. NOTE: never the other way round, nor one without the other's success."""
        result = settle(messages)
        self._acknowledge([message.stream_id for message in messages], result)
        log.debug("settled", **vars(result))

    def _acknowledge(self, ids: list[str], result: SettleResult) -> None:
        pipe = self._broker.pipeline(transaction=True)
        pipe.xack(USAGE_STREAM, USAGE_GROUP, *ids)
        pipe.xdel(USAGE_STREAM, *ids)
        for name, count in vars(result).items():
            pipe.hincrby(status.TOTALS_KEY, name, count)
        pipe.time()
        self._last_batch_at = _microseconds(pipe.execute()[-1])

    def _read(self, after: str, block_ms: int | None) -> list[UsageMessage]:
        """Up to a batch of messages: new ones for `>`, else this consumer's pending ones after that id."""
        streams: dict[Any, Any] = {USAGE_STREAM: after}
        reply: Any = self._broker.xreadgroup(USAGE_GROUP, self._consumer, streams, count=self._batch, block=block_ms)
        return _messages(reply[0][1]) if reply else []

    def _take_over(self) -> None:
        """Settle what a dead consumer had read and not acknowledged, and forget consumers long gone."""
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
        """Make the group, to read from the stream's start, if there is none: at first, or after the broker lost it."""
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

    def _reap(self, told_ms: int) -> None:
        """Take back what is held for requests that cannot run any more; all that was told until then is settled."""
        if reaped := reservations.reap(datetime.fromtimestamp(told_ms / 1000, UTC)):
            log.warning("slices_reclaimed", slices=reaped)

    def _report(self) -> int:
        """Tell how it goes; returns until when (in milliseconds) all that was told is settled."""
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
            last_batch_at=self._last_batch_at,
            backlog=backlog,
            lag_ms=max(0, now // 1000 - since),
        )
        self._broker.set(status.STATUS_KEY, status.encode(report))
        return since

    def _back_off(self, fault: Exception) -> None:
        """Wait a little longer with each fault in a row, and by chance, so that many do not come back at once."""
        self._faults += 1
        seconds = min(MAX_BACKOFF_SECONDS, 0.1 * 2 ** min(self._faults, 10)) * random.uniform(0.5, 1.0)  # noqa: S311
        message = str(fault).partition("\n")[0]
        log.warning("settler_retrying", fault=type(fault).__name__, error=message, retry_in=round(seconds, 2))
        connection.close()
        self._stopping.wait(seconds)


def _messages(entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> list[UsageMessage]:
    """Entries as messages. One deleted while pending has no fields; one without an event is kept whole, for a look."""
    return [
        UsageMessage(stream_id.decode(), (fields.get(b"e") or encode(fields)) if fields else None)
        for stream_id, fields in entries
    ]


def _microseconds(time_: tuple[int, int]) -> int:
    return time_[0] * 1_000_000 + time_[1]
