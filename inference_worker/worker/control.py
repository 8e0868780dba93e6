"""The process's connection to the gateways: heartbeats, cancellations, deadlines, and draining on request."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec
import redis
import structlog

from inference_worker.contract.messages import (
    CORDONS_KEY,
    HEARTBEAT_SECONDS,
    HEARTBEAT_TTL_MS,
    REPLICAS_KEY,
    SUPPORT_KEY,
    Heartbeat,
    WorkerSupport,
    beat_key,
    claim_key,
    control_channel,
    encode,
    worker_of,
)
from inference_worker.contract.request import RequestError
from inference_worker.contract.unsettled_usage import UNSETTLED_KEY, UnsettledUsage
from inference_worker.worker.engine_client import ActiveJob
from inference_worker.worker.replica import ReplicaRecord

log = structlog.get_logger(__name__)

CLOSING_SECONDS = 5.0
MAX_REMEMBERED_CANCELS = 10_000
decode_cancel = msgspec.msgpack.Decoder(tuple[str, int, int]).decode  # request id, execution, attempt


class Executions(Protocol):
    """The executions of all replicas of the process."""

    def live(self) -> list[ActiveJob]: ...

    def cancel(self, live: ActiveJob, failure: RequestError | None = None) -> None: ...

    def requeue(self, live: ActiveJob) -> None: ...


class Control:
    """Two threads: one sends heartbeats, the other receives cancellations."""

    def __init__(
        self,
        broker: redis.Redis,
        process_id: str,
        engine: Executions,
        heartbeats: Callable[[int], Mapping[str, Heartbeat]],
        support: WorkerSupport,
        records: Callable[[], Iterable[ReplicaRecord]] = list,
        unsettled: Callable[[], UnsettledUsage | None] = lambda: None,
        journal_id: str = "",
    ) -> None:
        """Start the threads.

        Args:
            heartbeats: returns the heartbeat of each replica by its ID.
            support: is sent with the heartbeats, and without a replica alone.
            records: returns the values beside the heartbeats that are to be written now.
            unsettled: returns the report about the unsettled usage in the journal; None without any.
            journal_id: the ID of the journal; empty: there is none.
        """
        self._broker = broker
        self._process_id = process_id
        self._engine = engine
        self._heartbeats = heartbeats
        self._support = encode(support)
        self._records = records
        self._unsettled = unsettled
        self._journal_id = journal_id
        self._sent: frozenset[str] = frozenset()  # replicas of the last heartbeats
        self._closing = threading.Event()
        self._cancelled: OrderedDict[tuple[str, int, int], None] = OrderedDict()  # the last cancellations received
        self._threads = [
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._listen, name="control", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop both threads, and remove the replicas and the process from Valkey."""
        self._closing.set()
        give_up_at = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
            if thread.is_alive():
                log.warning("thread_left", thread=thread.name)
        ended = {*self._sent, self._process_id}
        try:
            with self._broker.pipeline(transaction=False) as pipe:
                pipe.hdel(REPLICAS_KEY, *ended)
                pipe.hdel(SUPPORT_KEY, self._process_id)
                pipe.delete(*map(beat_key, ended))
                pipe.execute()
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))

    def was_cancelled(self, live: ActiveJob) -> bool:
        """Return whether a cancellation of the execution was received, even before its submission."""
        return _key(live) in self._cancelled

    def _beat(self) -> None:
        beat = time.time_ns()  # so that a restarted replica's beats are higher
        while not self._closing.wait(HEARTBEAT_SECONDS):
            beat += 1
            try:
                records = self._records()  # first, since the heartbeats have the versions of digests
                if self._send_heartbeats(self._heartbeats(beat), records) == b"drain":
                    self._requeue()
            except redis.RedisError as exc:
                log.warning("broker_unreachable", error=str(exc))
            self._end_overdue()

    def _send_heartbeats(self, beats: Mapping[str, Heartbeat], records: Iterable[ReplicaRecord]) -> bytes | None:
        """Send the records and the heartbeats, and remove replicas that have ended.

        Returns:
            The operator's cordon of this worker.
        """
        removed = self._sent - beats.keys()
        self._sent |= beats.keys()
        with self._broker.pipeline(transaction=False) as pipe:
            for key, payload, ttl_seconds in records:
                pipe.set(key, payload, ex=ttl_seconds)
            for replica_id, beat in beats.items():
                pipe.hset(REPLICAS_KEY, replica_id, encode(beat))
                pipe.set(beat_key(replica_id), "", px=HEARTBEAT_TTL_MS)
            for replica_id in removed:
                pipe.hdel(REPLICAS_KEY, replica_id)
                pipe.delete(beat_key(replica_id))
            pipe.hset(SUPPORT_KEY, self._process_id, self._support)
            pipe.set(beat_key(self._process_id), "", px=HEARTBEAT_TTL_MS)
            if (unsettled := self._unsettled()) is not None:
                pipe.hset(UNSETTLED_KEY, self._journal_id, encode(unsettled))
            elif self._journal_id:
                pipe.hdel(UNSETTLED_KEY, self._journal_id)
            pipe.hget(CORDONS_KEY, worker_of(self._process_id))
            cordon: bytes | None = pipe.execute()[-1]
        self._sent = frozenset(beats)
        return cordon

    def _requeue(self) -> None:
        """Requeue executions that have sent no token. Gateways also see the cordon and dispatch them to another
        replica."""
        for live in self._engine.live():
            self._engine.requeue(live)

    def _end_overdue(self) -> None:
        now = time.time()
        for live in self._engine.live():
            if live.job.deadline < now:
                self._engine.cancel(live, RequestError("timeout", "the request exceeded its deadline"))

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                with self._broker.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.subscribe(control_channel(self._process_id))
                    self._cancel_flagged()  # cancellations during the disconnection
                    while not self._closing.is_set():
                        message = pubsub.get_message(timeout=0.5)
                        if message is not None:
                            self._cancel(message["data"])
            except redis.RedisError as exc:
                log.warning("broker_unreachable", error=str(exc))
                self._closing.wait(HEARTBEAT_SECONDS)

    def _cancel(self, data: bytes) -> None:
        try:
            execution_key = decode_cancel(data)
        except msgspec.MsgspecError:
            log.warning("control_message_unreadable", size=len(data))
            return
        # NOTE: cancellations are stored first and executions searched second; the worker submits an execution first and
        # checks for its cancellation second. So one of the two finds the other.
        self._cancelled[execution_key] = None
        while len(self._cancelled) > MAX_REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)
        for live in self._engine.live():
            if _key(live) == execution_key:
                self._engine.cancel(live)

    def _cancel_flagged(self) -> None:
        for live in self._engine.live():
            request_id, execution, attempt = _key(live)
            claim = self._broker.hmget(claim_key(request_id, execution), "cancel", "attempt", "state")
            flag, current, state = claim
            superseded = current is not None and int(current) != attempt
            if flag is not None or superseded or state == b"failed":
                self._engine.cancel(live)


def _key(live: ActiveJob) -> tuple[str, int, int]:
    billing_context = live.job.billing_context
    return billing_context.request_id, billing_context.execution, live.attempt
