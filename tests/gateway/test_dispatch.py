"""The dispatcher against a real Valkey, with the test in the worker's place."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
import redis.asyncio as redis

from inference_worker import claims
from inference_worker.engine.request import SamplingParams, TokenUsage
from inference_worker.protocol import (
    REPLICAS_KEY,
    USAGE_STREAM,
    Claimed,
    End,
    Envelope,
    Failed,
    Heartbeat,
    Job,
    Released,
    StreamEvent,
    Tokens,
    claim_key,
    control_channel,
    decode_usage,
    encode,
    gateway_stream,
    model_queue,
    request_log,
)
from millrace.gateway import dispatch
from millrace.gateway.dispatch import Dispatcher, Generation
from millrace.gateway.errors import ApiError

GATEWAY = "gw-a"


def make_job(request_id: str = "req_1", seconds: float = 60) -> Job:
    envelope = Envelope(time.time_ns() // 1000, request_id, 0, 1, 1, 1, "m")
    return Job(envelope, GATEWAY, [1, 2], SamplingParams(), b"salt", time.time() + seconds)


def heartbeat(beat: int) -> bytes:
    return encode(Heartbeat(beat, "m", True, False, 0, 0, 8, 10, 0))


async def eventually(true: Callable[[], Awaitable[object]], seconds: float = 8) -> None:
    async with asyncio.timeout(seconds):
        while not await true():
            await asyncio.sleep(0.02)


class Replica:
    """A worker as the dispatcher sees one: it beats, claims and answers."""

    def __init__(self, broker: redis.Redis, name: str) -> None:
        self.broker = broker
        self.name = name
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        beat = time.time_ns()
        while True:
            beat += 1
            await self.broker.hset(REPLICAS_KEY, self.name, heartbeat(beat))  # type: ignore[misc]
            await asyncio.sleep(0.2)

    def kill(self) -> None:
        self._task.cancel()

    async def claim(self, request_id: str, attempt: int = 1) -> bool:
        job = await self.broker.eval(claims.CLAIM, 1, claim_key(request_id, 0), attempt, self.name)  # type: ignore[misc]
        if job is not None:
            await self.send(Claimed(request_id, attempt, self.name))
        return job is not None

    async def send(self, *events: StreamEvent) -> None:
        for event in events:
            if isinstance(event, Tokens | End | Failed):
                await self.broker.rpush(request_log(event.request_id, event.attempt), encode(event))  # type: ignore[misc]
        await self.broker.xadd(gateway_stream(GATEWAY), {"e": encode(list(events))})


@pytest_asyncio.fixture
async def dispatcher(broker: redis.Redis) -> AsyncIterator[Dispatcher]:
    url = os.environ["MILLRACE_BROKER_URL"]
    dispatcher = Dispatcher(broker, url, GATEWAY, queue_seconds=5, keep_seconds=60)
    await dispatcher.start()
    yield dispatcher
    await dispatcher.stop()


@pytest_asyncio.fixture
async def replica(broker: redis.Redis, dispatcher: Dispatcher) -> AsyncIterator[Replica]:
    replica = Replica(broker, "r1")
    await eventually(lambda: serving(dispatcher))
    yield replica
    replica.kill()


async def serving(dispatcher: Dispatcher) -> bool:
    return bool(dispatcher.replicas.serving("m"))


async def next_event(generation: Generation) -> Tokens | End | Failed:
    async with asyncio.timeout(10):
        return await generation.next_event()


async def doorbells(broker: redis.Redis) -> int:
    return int(await broker.llen(model_queue("m")))  # type: ignore[misc]


async def verdicts(broker: redis.Redis) -> list[str]:
    return [decode_usage(fields[b"e"]).verdict for _, fields in await broker.xrange(USAGE_STREAM)]


async def test_it_works(broker: redis.Redis, dispatcher: Dispatcher, replica: Replica) -> None:
    generation = await dispatcher.submit(make_job(), b"form")

    async def rung() -> bool:
        return await doorbells(broker) == 1

    await eventually(rung)
    assert await replica.claim("req_1")
    sent = [Tokens("req_1", 1, 0, [5], "Hi", 0), End("req_1", 1, 1, "stop", None, TokenUsage(2, output=1))]
    await replica.send(*sent)
    assert [await next_event(generation), await next_event(generation)] == sent
    assert generation.owner == "r1"
    dispatcher.release(generation)
    assert dispatcher.in_flight == 0


async def test_without_a_replica_it_is_refused_early(dispatcher: Dispatcher) -> None:
    with pytest.raises(ApiError) as caught:
        dispatcher.require_replica("m")
    assert (caught.value.status, caught.value.code) == (503, "model_loading")
    assert caught.value.retry_after


async def test_a_worker_that_dies_before_the_first_token_is_replaced(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await dispatcher.submit(make_job(), b"form")
    assert await replica.claim("req_1")
    await asyncio.sleep(0.1)
    replica.kill()

    async def raised() -> bool:
        return generation.attempt == 2

    await eventually(raised)
    other = Replica(broker, "r2")
    assert not await other.claim("req_1", 1)  # the old doorbell, redelivered
    assert await other.claim("req_1", 2)
    # The first was only asleep: what it says now is not for the client.
    await replica.send(Tokens("req_1", 1, 0, [9], "stale", 0))
    await other.send(Tokens("req_1", 2, 0, [5], "fresh", 0))
    event = await next_event(generation)
    assert isinstance(event, Tokens)
    assert event.text == "fresh"
    assert await verdicts(broker) == []
    other.kill()


async def test_a_worker_that_dies_mid_stream_ends_it_with_an_error_and_no_bill(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await dispatcher.submit(make_job(), b"form")
    await replica.claim("req_1")
    await replica.send(Tokens("req_1", 1, 0, [5], "Hi", 0))
    assert isinstance(await next_event(generation), Tokens)
    replica.kill()
    started = time.monotonic()
    failed = await next_event(generation)
    assert isinstance(failed, Failed)
    assert failed.code == "worker_lost"
    assert time.monotonic() - started < 5
    assert await verdicts(broker) == ["failed"]


async def test_an_end_that_was_told_before_the_death_counts(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    """The end stands in the log though its batch never reached the gateway: no error, no second verdict."""
    generation = await dispatcher.submit(make_job(), b"form")
    await replica.claim("req_1")
    await replica.send(Tokens("req_1", 1, 0, [5], "Hi", 0))
    await next_event(generation)
    end = End("req_1", 1, 1, "stop", None, TokenUsage(2, output=1))
    await broker.rpush(request_log("req_1", 1), encode(end))  # type: ignore[misc]
    await broker.hset(claim_key("req_1", 0), "state", "done")  # type: ignore[misc]
    replica.kill()
    assert await next_event(generation) == end
    assert await verdicts(broker) == []


async def test_what_a_draining_worker_hands_back_is_rung_again(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await dispatcher.submit(make_job(), b"form")
    await replica.claim("req_1")
    await broker.eval(claims.GIVE_UP, 1, claim_key("req_1", 0), 1, "r1")  # type: ignore[misc]
    before = await doorbells(broker)
    await replica.send(Released("req_1", 2))

    async def rung_again() -> bool:
        return await doorbells(broker) > before

    await eventually(rung_again)
    assert generation.attempt == 2
    assert await Replica(broker, "r2").claim("req_1", 2)


async def test_words_that_were_lost_are_read_from_the_claim(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither who claimed it nor that it was handed back reached the gateway."""
    monkeypatch.setattr(dispatch, "RING_AGAIN_SECONDS", 0.2)
    claimed = await dispatcher.submit(make_job("req_1"), b"form")
    handed_back = await dispatcher.submit(make_job("req_2"), b"form")
    for name in ("req_1", "req_2"):
        await broker.eval(claims.CLAIM, 1, claim_key(name, 0), 1, "r1")  # type: ignore[misc]
    await broker.eval(claims.GIVE_UP, 1, claim_key("req_2", 0), 1, "r1")  # type: ignore[misc]

    async def caught_up() -> bool:
        return claimed.owner == "r1" and handed_back.attempt == 2

    await eventually(caught_up)
    replica.kill()

    async def given_up() -> bool:
        return claimed.attempt == 2

    await eventually(given_up)


@pytest.mark.usefixtures("replica")
async def test_a_lost_doorbell_rings_again(
    broker: redis.Redis, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "RING_AGAIN_SECONDS", 0.3)
    await dispatcher.submit(make_job(), b"form")

    async def rung() -> bool:
        return await doorbells(broker) > 0

    await eventually(rung)
    await broker.delete(model_queue("m"))
    await eventually(rung)


@pytest.mark.usefixtures("replica")
async def test_what_nobody_takes_in_time_is_refused(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    generation = await dispatcher.submit(make_job(), b"form")
    failed = await next_event(generation)
    assert isinstance(failed, Failed)
    assert failed.code == "server_is_overloaded"
    assert await broker.hget(claim_key("req_1", 0), "state") == b"cancelled"  # type: ignore[misc]


async def test_cancel_reaches_the_worker(broker: redis.Redis, dispatcher: Dispatcher, replica: Replica) -> None:
    await dispatcher.submit(make_job(), b"form")
    await replica.claim("req_1")
    async with broker.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(control_channel("r1"))
        await pubsub.get_message(timeout=1)
        await dispatcher.cancel("req_1", 0)
        async with asyncio.timeout(5):
            while (message := await pubsub.get_message(timeout=1)) is None:
                pass
    assert message["data"] == encode(("req_1", 0, 1))


async def test_a_worker_that_says_nothing_does_not_outlive_the_deadline(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "OVERDUE_SECONDS", 0.1)
    generation = await dispatcher.submit(make_job(seconds=0.5), b"form")
    await replica.claim("req_1")
    failed = await next_event(generation)
    assert isinstance(failed, Failed)
    assert failed.code == "timeout"
    assert await verdicts(broker) == ["failed"]
