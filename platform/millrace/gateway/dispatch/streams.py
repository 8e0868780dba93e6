"""Event streams from the workers: one reader per gateway and a bounded buffer per execution.

Every event is also in the execution's log `millrace:request_events:<request>:<attempt>` for as long as streams are
stored. A buffer may therefore drop events: those that a slow client missed are read from the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract.command_connection import CommandConnection
from inference_worker.contract.messages import (
    AnswerEvent,
    End,
    Failed,
    StreamEvent,
    decode_event,
    decode_events,
    event_log_key,
    gateway_stream,
)

log = structlog.get_logger(__name__)

BUFFERED_EVENTS = 256
STREAM_SECONDS = 60  # how long a gateway's stream exists after the gateway fails
_READ = ("XREAD", "COUNT", 200, "BLOCK", 2000, "STREAMS")
LogEvent = AnswerEvent | Failed
_LAST = End, Failed  # types of the last event
LOCAL_FAILURES = ("stream_lost", "timeout")  # failures seen only by this gateway; the execution may have completed
STREAM_LOST = "A part of this response was lost. Send the request again."


class EventsLost(Exception):
    """Raised if a part of a stream was lost in Valkey."""


async def read_log(broker: redis.Redis, request_id: str, attempt: int, first_seq: int) -> list[LogEvent]:
    """Return the logged events of an attempt from `first_seq` on, in order, each once.

    Raises:
            EventsLost: the next event is missing and later ones exist.
    """
    events, _ = await read_log_until_gap(broker, request_id, attempt, first_seq)
    return events


async def read_log_until_gap(
    broker: redis.Redis, request_id: str, attempt: int, first_seq: int
) -> tuple[list[LogEvent], bool]:
    """Return the logged events up to a gap, and whether there are later events."""
    # Event n is element n, unless a worker wrote events twice after a broken connection, or Valkey lost some.
    log_key = event_log_key(request_id, attempt)
    payloads: Any = await broker.lrange(log_key, first_seq, -1)
    events, has_gap = _in_order(payloads, first_seq)
    if first_seq and (not payloads or has_gap):
        payloads = await broker.lrange(log_key, 0, -1)
        events, has_gap = _in_order(payloads, first_seq)
    if has_gap and not events:
        raise EventsLost
    return events, has_gap


def _in_order(payloads: list[bytes], first_seq: int) -> tuple[list[LogEvent], bool]:
    """Return the events from `first_seq` on without a gap, and whether there are later ones beyond a gap."""
    by_seq: dict[int, LogEvent] = {}
    for payload in payloads:
        event = decode_event(payload)
        if isinstance(event, LogEvent) and event.seq >= first_seq:
            by_seq.setdefault(event.seq, event)
    events: list[LogEvent] = []
    while (event := by_seq.pop(first_seq + len(events), None)) is not None:
        events.append(event)
    return events, bool(by_seq)


class EventBuffer:
    """A bounded buffer of one execution's events, which the request reads in order, each once."""

    def __init__(self, broker: redis.Redis, request_id: str, attempt: int = 1) -> None:
        self._broker = broker
        self._request_id = request_id
        self._events: deque[LogEvent] = deque()
        self._waiters: list[asyncio.Future[None]] = []  # waits for an event, of the request and of its end
        self._next_seq = 0  # sequence number of the next event to return
        self._must_read_log = False  # events are missing in the buffer
        self._failure: Failed | None = None  # a failure that is not in the log
        self.attempt = attempt
        self.is_read = False  # the last event was returned

    @property
    def is_full(self) -> bool:
        return len(self._events) >= BUFFERED_EVENTS

    def replay(self, events: Iterable[LogEvent]) -> None:
        """Add events that are in no log, in order."""
        self._events.extend(events)
        self._wake()

    def put(self, event: LogEvent) -> None:
        expected = self._next_seq + len(self._events)
        if event.seq == expected and not self._must_read_log and len(self._events) < BUFFERED_EVENTS:
            self._events.append(event)
        elif event.seq >= expected:
            self._must_read_log = True
        self._wake()

    def refill(self) -> None:
        """Read the log again, since events may have been missed."""
        self._must_read_log = True
        self._wake()

    def fail(self, code: str, message: str, *, unsent: bool = False) -> None:
        """End with a failure after the events that are in the log. With `unsent`, there is no log."""
        self._failure = Failed(self._request_id, self.attempt, -1, code, message)
        self._must_read_log = not unsent
        self._wake()

    def restart(self, attempt: int) -> None:
        """Discard the events, since another attempt starts.

        If events were read before, the reader must skip what the new attempt repeats.
        """
        self.attempt = attempt
        self._events.clear()
        self._next_seq = 0
        self._must_read_log = False
        self.is_read = False

    def _wake(self) -> None:
        while self._waiters:
            if not (waiter := self._waiters.pop()).done():
                waiter.set_result(None)

    async def get(self) -> LogEvent:
        """Wait for the next event and return it."""
        while not self._events:
            if self._must_read_log:
                await self._read_log()
            if self._events or self._must_read_log:
                continue
            if self._failure is not None:
                self.is_read = True
                return self._failure
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self._next_seq += 1
        event = self._events.popleft()
        if isinstance(event, _LAST):
            self.is_read = True
        return event

    async def _read_log(self) -> None:
        self._must_read_log = False
        attempt = self.attempt
        try:
            events, gap = await read_log_until_gap(self._broker, self._request_id, attempt, self._next_seq)
        except redis.RedisError:
            self._must_read_log = True
            await asyncio.sleep(0.2)
            return
        except EventsLost:
            self._failure = Failed(self._request_id, attempt, -1, "stream_lost", STREAM_LOST)
            return
        if attempt != self.attempt:
            return
        # Events that arrived while the log was read may also be in the log.
        arrived, self._events = self._events, deque(events[:BUFFERED_EVENTS])
        # Before a gap more must be read: the next read reports the loss.
        self._must_read_log = self._must_read_log or len(events) > BUFFERED_EVENTS or gap
        for event in arrived:
            self.put(event)


Sink = Callable[[StreamEvent], None]


class StreamReader:
    """The reader of `millrace:gateway_events:<gateway>`, which passes each event to `sink`."""

    def __init__(self, broker: redis.Redis, gateway_id: str, sink: Sink, on_gap: Callable[[], None]) -> None:
        self._broker = broker
        self._commands = CommandConnection(broker)
        self._stream = gateway_stream(gateway_id)
        self._sink = sink
        self._on_gap = on_gap

    async def create(self) -> None:
        """Create the stream. Workers write only to existing streams, so that of a failed gateway expires."""
        if not await self._broker.exists(self._stream):
            await self._broker.xadd(self._stream, {"e": msgspec.msgpack.encode([])})
        await self._broker.expire(self._stream, STREAM_SECONDS)

    async def run(self) -> None:
        """Read until cancelled. After an outage call `on_gap`, since events may have been lost."""
        last: Any = "$"
        connected = False
        while True:
            try:
                if not connected:
                    await self.create()
                    last = await self._read_newest()
                    connected = True
                    self._on_gap()
                (reply,) = await self._commands.execute([(*_READ, self._stream, last)])
                for entries in () if reply is None else _streams(reply):
                    for entry_id, (_, payload) in entries:
                        last = entry_id
                        self._deliver(payload)
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                connected = False
                await asyncio.sleep(0.2)

    def close(self) -> None:
        """Close the connection of `run`, which must have ended."""
        self._commands.close()

    async def _read_newest(self) -> Any:
        newest: Any = await self._broker.xrevrange(self._stream, count=1)
        return newest[0][0] if newest else "0"

    def _deliver(self, payload: bytes) -> None:
        try:
            events: list[StreamEvent] = decode_events(payload)
        except msgspec.MsgspecError:
            log.error("stream_batch_unreadable", size=len(payload))
            return
        for event in events:
            self._sink(event)


def _streams(reply: Any) -> Iterable[Any]:
    """Return the entries of each stream. XREAD's reply is a map in RESP3, and a list of pairs in RESP2."""
    return reply.values() if isinstance(reply, dict) else (entries for _, entries in reply)
