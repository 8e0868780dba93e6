"""Token streams in: one reader per gateway, a bounded buffer per request, the request's log for who falls behind.

Every event is in the request's log `millrace:request_events:<request>:<attempt>` for as long as streams are kept, so a
buffer may drop: what a slow client missed is read again from the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract.messages import (
    AnswerEvent,
    Failed,
    StreamEvent,
    decode_event,
    decode_events,
    event_log_key,
    gateway_stream,
)

log = structlog.get_logger(__name__)

BUFFERED_EVENTS = 256
STREAM_SECONDS = 60  # a gateway's stream outlives it by this
LogEvent = AnswerEvent | Failed
LOST = "A part of this answer was lost; please send the request again."


class EventsLost(Exception):
    """The broker has lost a part of a stream: what follows must not be told as if it were the next."""


async def read_log(broker: redis.Redis, request_id: str, attempt: int, first_seq: int) -> list[LogEvent]:
    """Return the logged events of an attempt from `first_seq` on, in order, each once.

    Raises:
        EventsLost: later ones are there, the next one is not.
    """
    events, _ = await read_log_to_gap(broker, request_id, attempt, first_seq)
    return events


async def read_log_to_gap(
    broker: redis.Redis, request_id: str, attempt: int, first_seq: int
) -> tuple[list[LogEvent], bool]:
    """Return the logged events up to a gap, and whether there are later ones."""
    # Event n is element n, unless a worker wrote a round twice after a broken connection, or the broker lost some.
    log_key = event_log_key(request_id, attempt)
    payloads: Any = await broker.lrange(log_key, first_seq, -1)
    events, rest = _in_order(payloads, first_seq)
    if first_seq and (not payloads or rest):
        payloads = await broker.lrange(log_key, 0, -1)
        events, rest = _in_order(payloads, first_seq)
    if rest and not events:
        raise EventsLost
    return events, rest


def _in_order(payloads: list[bytes], first_seq: int) -> tuple[list[LogEvent], bool]:
    """Return the events from `first_seq` on without a gap, and whether there are later ones beyond a gap."""
    by_seq: dict[int, LogEvent] = {}
    for payload in payloads:
        event = decode_event(payload)
        if isinstance(event, LogEvent) and event.seq >= first_seq:
            by_seq.setdefault(event.seq, event)
    events: list[LogEvent] = []
    while (found := by_seq.pop(first_seq + len(events), None)) is not None:
        events.append(found)
    return events, bool(by_seq)


class EventBuffer:
    """One request's events on their way to its client: in order, each once, never more than a bounded number held."""

    def __init__(self, broker: redis.Redis, request_id: str, attempt: int = 1) -> None:
        self._broker = broker
        self._request_id = request_id
        self._events: deque[LogEvent] = deque()
        self._ready = asyncio.Event()
        self._next_seq = 0  # what the client gets next
        self._behind = False  # events are missing here and must be read from the log
        self._last: Failed | None = None  # the end, if it is not in the log
        self.attempt = attempt

    def put(self, event: LogEvent) -> None:
        expected = self._next_seq + len(self._events)
        if event.seq == expected and not self._behind and len(self._events) < BUFFERED_EVENTS:
            self._events.append(event)
        elif event.seq >= expected:
            self._behind = True
        self._ready.set()

    def refill(self) -> None:
        """Look into the log: events may have been missed."""
        self._behind = True
        self._ready.set()

    def fail(self, code: str, message: str, *, unsent: bool = False) -> None:
        """End with a failure, after what the log still holds; if it was never sent there is none."""
        self._last = Failed(self._request_id, self.attempt, -1, code, message)
        self._behind = not unsent
        self._ready.set()

    def restart(self, attempt: int) -> None:
        """Another attempt answers from the start. Only before the first event has been taken."""
        self.attempt = attempt
        self._events.clear()
        self._next_seq = 0
        self._behind = False

    async def get(self) -> LogEvent:
        """Wait for the next event and return it."""
        while not self._events:
            if self._behind:
                await self._read_log()
            if self._events or self._behind:
                continue
            if self._last is not None:
                return self._last
            self._ready.clear()
            await self._ready.wait()
        self._next_seq += 1
        return self._events.popleft()

    async def _read_log(self) -> None:
        self._behind = False
        attempt = self.attempt
        try:
            events, gap = await read_log_to_gap(self._broker, self._request_id, attempt, self._next_seq)
        except redis.RedisError:
            self._behind = True
            await asyncio.sleep(0.2)
            return
        except EventsLost:
            self._last = Failed(self._request_id, attempt, -1, "stream_lost", LOST)
            return
        if attempt != self.attempt:
            return
        # What arrived while the log was read may stand in it too.
        arrived, self._events = self._events, deque(events[:BUFFERED_EVENTS])
        # Before a gap it stays behind: the next look tells that what follows is lost.
        self._behind = self._behind or len(events) > BUFFERED_EVENTS or gap
        for event in arrived:
            self.put(event)


Sink = Callable[[StreamEvent], None]


class StreamReader:
    """Reads `millrace:gateway_events:<gateway>` and hands each event to `sink`."""

    def __init__(self, broker: redis.Redis, gateway_id: str, sink: Sink, on_gap: Callable[[], None]) -> None:
        self._broker = broker
        self._stream = gateway_stream(gateway_id)
        self._sink = sink
        self._on_gap = on_gap

    async def create(self) -> None:
        """Make the stream: workers write only to streams that exist, so a dead gateway's is not kept alive."""
        if not await self._broker.exists(self._stream):
            await self._broker.xadd(self._stream, {"e": msgspec.msgpack.encode([])})
        await self._broker.expire(self._stream, STREAM_SECONDS)

    async def run(self) -> None:
        """Read until cancelled. After an outage `on_gap` is called: events may have been lost."""
        last: Any = "$"
        connected = False
        while True:
            try:
                if not connected:
                    await self.create()
                    last = await self._newest()
                    connected = True
                    self._on_gap()
                reply: Any = await self._broker.xread({self._stream: last}, count=200, block=2000)
                for _, entries in reply or ():
                    for entry_id, fields in entries:
                        last = entry_id
                        self._deliver(fields[b"e"])
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                connected = False
                await asyncio.sleep(0.2)

    async def _newest(self) -> Any:
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
