"""A request's stream buffer: ordered, without duplicates, limited, and refilled from the event log."""

from __future__ import annotations

import asyncio
import random

import pytest
import redis.asyncio as redis

from inference_worker.contract.messages import Claimed, End, Failed, Tokens, encode, event_log_key, gateway_stream
from inference_worker.contract.request import TokenCounts
from millrace.gateway.dispatch.streams import BUFFERED_EVENTS, EventBuffer, EventsLost, LogEvent, StreamReader, read_log
from tests.support.waiting import eventually_async


def events(count: int, attempt: int = 1) -> list[LogEvent]:
    tokens: list[LogEvent] = [Tokens("req_1", attempt, n, [n], f"{n} ") for n in range(count - 1)]
    return [*tokens, End("req_1", attempt, count - 1, "stop", None, TokenCounts(1, output=count))]


async def write_log(broker: redis.Redis, logged: list[LogEvent], attempt: int = 1) -> None:
    await broker.rpush(event_log_key("req_1", attempt), *(encode(event) for event in logged))  # type: ignore[misc]


async def take(buffer: EventBuffer, count: int) -> list[LogEvent]:
    async with asyncio.timeout(60):
        return [await buffer.get() for _ in range(count)]


async def test_events_are_received_in_order(broker: redis.Redis) -> None:
    buffer = EventBuffer(broker, "req_1")
    wanted = events(5)
    reader = asyncio.create_task(take(buffer, 5))
    for event in wanted:
        buffer.put(event)
        await asyncio.sleep(0)
    assert await reader == wanted


async def test_an_event_ends_all_waits(broker: redis.Redis) -> None:
    """The end of a request may wait for events that the request itself still waits for."""
    buffer = EventBuffer(broker, "req_1")
    readers = [asyncio.create_task(take(buffer, 1)) for _ in range(2)]
    await asyncio.sleep(0)
    for event in events(2):
        buffer.put(event)
    taken = [event for reader in readers for event in await reader]
    assert sorted(taken, key=lambda event: event.seq) == events(2)


async def test_a_slow_reader_is_refilled_from_the_log_and_memory_stays_bounded(broker: redis.Redis) -> None:
    buffer = EventBuffer(broker, "req_1")
    wanted = events(3 * BUFFERED_EVENTS)
    await write_log(broker, wanted)
    for event in wanted:
        buffer.put(event)
        assert len(buffer._events) <= BUFFERED_EVENTS
    assert await take(buffer, len(wanted)) == wanted


@pytest.mark.parametrize("seed", range(20))
async def test_lost_and_duplicate_events_cause_no_gap_and_no_repeat(broker: redis.Redis, seed: int) -> None:
    rng = random.Random(seed)
    buffer = EventBuffer(broker, "req_1")
    wanted = events(60)
    reader = asyncio.create_task(take(buffer, 60))
    for event in wanted:
        await write_log(broker, [event] * rng.choice([1, 1, 2]))
        for _ in range(rng.choice([0, 1, 1, 2])):
            buffer.put(event)
        if rng.random() < 0.1:
            await asyncio.sleep(0.001)
    buffer.refill()  # as a gateway does after an outage
    assert await reader == wanted


async def test_another_attempt_restarts_the_stream(broker: redis.Redis) -> None:
    buffer = EventBuffer(broker, "req_1")
    buffer.restart(2)
    again = events(3, attempt=2)
    await write_log(broker, events(4), attempt=1)
    await write_log(broker, again, attempt=2)
    buffer.refill()
    assert await take(buffer, 3) == again


async def test_a_failure_follows_the_remaining_events_of_the_log(broker: redis.Redis) -> None:
    buffer = EventBuffer(broker, "req_1")
    logged = events(4)[:3]
    await write_log(broker, logged)
    buffer.put(logged[0])
    buffer.fail("worker_lost", "gone")
    taken = await take(buffer, 4)
    assert taken[:3] == logged
    assert isinstance(taken[3], Failed)
    assert taken[3].code == "worker_lost"


async def test_events_written_twice_are_read_once(broker: redis.Redis) -> None:
    """A worker that lost its connection writes its batch of events again."""
    wanted = events(6)
    await write_log(broker, wanted[:4] + wanted[2:])
    assert await read_log(broker, "req_1", 1, 0) == wanted


async def test_events_that_the_broker_lost_are_not_a_gap(broker: redis.Redis) -> None:
    """After a crash of the broker, the positions of the log's elements no longer equal their numbers."""
    wanted = events(12)
    await write_log(broker, wanted[:4] + wanted[7:])
    assert await read_log(broker, "req_1", 1, 2) == wanted[2:4]
    with pytest.raises(EventsLost):
        await read_log(broker, "req_1", 1, 4)
    # A reader that received the lost events continues.
    assert await read_log(broker, "req_1", 1, 8) == wanted[8:]
    assert await read_log(broker, "req_1", 1, 12) == []


async def test_a_reader_of_a_lost_part_gets_an_error(broker: redis.Redis) -> None:
    buffer = EventBuffer(broker, "req_1")
    wanted = events(12)
    await write_log(broker, wanted[:4] + wanted[7:])
    buffer.refill()
    taken = await take(buffer, 5)
    assert taken[:4] == wanted[:4]
    assert isinstance(taken[4], Failed)
    assert taken[4].code == "stream_lost"


async def test_a_reader_distributes_the_events_sent_to_its_gateway(broker: redis.Redis) -> None:
    got: list[object] = []
    gaps: list[None] = []
    reader = StreamReader(broker, "gw-a", got.append, lambda: gaps.append(None))
    task = asyncio.create_task(reader.run())
    await eventually_async(lambda: gaps)
    sent = Claimed("req_1", 1, "r")
    await broker.xadd(gateway_stream("gw-a"), {"e": b"\xc1"})  # unreadable: logged and skipped
    await broker.xadd(gateway_stream("gw-a"), {"e": encode([sent])}, nomkstream=True)
    await eventually_async(lambda: got)
    assert got == [sent]
    assert await broker.ttl(gateway_stream("gw-a")) > 0
    # After a lost connection, it reconnects and reports that events may be lost.
    await broker.client_kill_filter(_type="normal", skipme=True)
    await eventually_async(lambda: len(gaps) >= 2)
    await broker.xadd(gateway_stream("gw-a"), {"e": encode([sent])}, nomkstream=True)
    await eventually_async(lambda: len(got) >= 2)
    task.cancel()
