"""Replicas that are lost, suspected or cordoned: their executions move, end, or continue."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
import redis.asyncio as redis

from inference_worker.contract import claims
from inference_worker.contract.messages import (
    CORDONS_KEY,
    USAGE_STREAM,
    End,
    ExecutionUsage,
    Failed,
    Tokens,
    claim_key,
    control_channel,
    encode,
    event_log_key,
    gateway_stream,
)
from inference_worker.contract.request import TokenCounts
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch import monitor, replicas
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from tests.support.gateway.dispatching import make_job, next_event, outcomes, owned, send, serving, wakeups
from tests.support.gateway.replica import GATEWAY, Replica
from tests.support.waiting import eventually_async


async def test_a_worker_that_dies_before_the_first_token_is_replaced(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    assert await replica.claim("req_1")
    await asyncio.sleep(0.1)
    replica.kill()

    async def raised() -> bool:
        return generation.attempt == 2

    await eventually_async(raised)
    other = Replica(broker, "r2")
    assert not await other.claim("req_1", 1)  # the old wakeup, redelivered
    assert await other.claim("req_1", 2)
    # The first replica was only paused; its later events are not sent to the client.
    await replica.send(Tokens("req_1", 1, 0, [9], "stale"))
    await other.send(Tokens("req_1", 2, 0, [5], "fresh"))
    event = await next_event(generation)
    assert isinstance(event, Tokens)
    assert event.text == "fresh"
    assert await outcomes(broker) == []
    other.stall()


async def test_a_worker_that_dies_mid_stream_ends_it_with_an_error_and_no_charge(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    await replica.claim("req_1")
    await replica.send(Tokens("req_1", 1, 0, [5], "Hi"))
    assert isinstance(await next_event(generation), Tokens)
    replica.kill()
    started = time.monotonic()
    failed = await next_event(generation)
    assert isinstance(failed, Failed)
    assert failed.code == "worker_lost"
    assert time.monotonic() - started < 20  # long before its deadline
    assert await outcomes(broker) == ["failed"]


async def test_an_end_written_before_the_death_counts(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    """The end is in the event log, though it never reached the gateway: no error and no second outcome."""
    generation = await send(dispatcher, make_job())
    await replica.claim("req_1")
    await replica.send(Tokens("req_1", 1, 0, [5], "Hi"))
    await next_event(generation)
    end = End("req_1", 1, 1, "stop", None, TokenCounts(2, output=1))
    await broker.rpush(event_log_key("req_1", 1), encode(end))
    await broker.hset(claim_key("req_1", 0), "state", "done")
    replica.kill()
    assert await next_event(generation) == end
    assert await outcomes(broker) == []


@pytest.fixture
def soon_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspect replicas after one second without a heartbeat, and treat them as lost after four."""
    monkeypatch.setattr(replicas, "REPLICA_SUSPECT_SECONDS", 1.0)
    monkeypatch.setattr(replicas, "REPLICA_LOST_SECONDS", 4.0)


@pytest.mark.usefixtures("soon_suspected")
async def test_a_suspected_replica_keeps_its_streams_and_loses_waiting_requests(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    begun, claimed, unclaimed = [await send(dispatcher, make_job(f"req_{n}")) for n in range(3)]
    for request_id in ("req_0", "req_1"):
        await replica.claim(request_id)
    await replica.send(Tokens("req_0", 1, 0, [5], "Hi"))
    await next_event(begun)
    await eventually_async(lambda: owned(claimed, "r1"))
    other = Replica(broker, "r2")
    await eventually_async(lambda: two_serving(dispatcher))
    async with broker.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(control_channel("r1"))
        await pubsub.get_message(timeout=1)
        replica.stall()
        await eventually_async(lambda: sent_to(claimed, "r2"))
        await eventually_async(lambda: sent_to(unclaimed, "r2"))
        async with asyncio.timeout(60):
            while (message := await pubsub.get_message(timeout=1)) is None:
                pass
    assert message["data"] == encode(("req_1", 0, 1))  # the attempt that was moved must not run twice
    assert (claimed.attempt, unclaimed.attempt) == (2, 1)

    async def written() -> bool:
        return await other.claim("req_1", 2)

    await eventually_async(written)
    await other.send(Tokens("req_1", 2, 0, [7], "fresh"))
    replica.resume()
    assert not await finish(broker, "r1", "req_1", 1)  # the silent replica ends its attempt anyway
    await replica.send(Tokens("req_1", 1, 0, [9], "stale"), Tokens("req_0", 1, 1, [6], " there"))
    texts = [event.text for each in (claimed, begun) if isinstance(event := await next_event(each), Tokens)]
    assert texts == ["fresh", " there"]
    assert await finish(broker, "r1", "req_0", 1)
    assert await finish(broker, "r2", "req_1", 2)
    assert await outcomes(broker) == ["completed", "completed"]
    await eventually_async(lambda: two_serving(dispatcher))
    other.stall()


async def finish(broker: redis.Redis, replica: str, request_id: str, attempt: int) -> bool:
    """End an attempt as its worker does; False if it no longer counts."""
    billing_context = make_job(request_id).billing_context
    usage = TokenCounts(2, output=1)
    event = ExecutionUsage(billing_context, attempt, "completed", "stop", usage, replica, 32)
    end = End(request_id, attempt, 9, "stop", None, usage)
    keys = [claim_key(request_id, 0), USAGE_STREAM, gateway_stream(GATEWAY), event_log_key(request_id, attempt)]
    args = [attempt, encode(event), encode([end]), 60, encode(end)]
    return await broker.eval(claims.FINISH, 4, *keys, *args) is not None


@pytest.mark.usefixtures("soon_suspected")
async def test_without_another_replica_a_suspected_one_keeps_its_claims(
    dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    await replica.claim("req_1")
    await eventually_async(lambda: owned(generation, "r1"))
    replica.stall()

    async def suspected() -> bool:
        return dispatcher.replicas.is_suspected("r1")

    await eventually_async(suspected)
    with pytest.raises(ApiError) as exc_info:
        dispatcher.require_capacity("m", 1)
    assert exc_info.value.code == "model_loading"
    replica.resume()
    await eventually_async(lambda: serving(dispatcher))
    assert (generation.attempt, generation.owner) == (1, "r1")
    await replica.send(Tokens("req_1", 1, 0, [5], "Hi"))
    assert isinstance(await next_event(generation), Tokens)


@pytest.mark.usefixtures("soon_suspected")
async def test_a_request_that_silences_replicas_is_not_sent_to_all_of_them(
    broker: redis.Redis, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "REPLICA_LOST_SECONDS", 60.0)
    every = {name: Replica(broker, name) for name in ("r1", "r2", "r3", "r4")}

    async def all_serve() -> bool:
        return len(dispatcher.replicas.serving("m")) == len(every)

    await eventually_async(all_serve)
    generation = await send(dispatcher, make_job())
    for attempt in range(1, monitor.MAX_MOVES + 2):
        assert generation.target is not None
        victim = every[generation.target]
        await eventually_async(partial(victim.claim, "req_1", attempt))
        await eventually_async(partial(owned, generation, victim.name))
        victim.stall()
        await eventually_async(partial(is_suspected, dispatcher, victim.name))
        if attempt <= monitor.MAX_MOVES:
            await eventually_async(partial(moved_on, generation, attempt))
    await asyncio.sleep(1.2)  # two more checks
    assert (generation.attempt, generation.owner) == (monitor.MAX_MOVES + 1, victim.name)
    for each in every.values():
        each.stall()


async def is_suspected(dispatcher: Dispatcher, replica: str) -> bool:
    return dispatcher.replicas.is_suspected(replica)


async def moved_on(generation: Execution, attempt: int) -> bool:
    return generation.attempt > attempt and generation.target is not None


@pytest.mark.usefixtures("soon_suspected")
async def test_a_replica_lost_by_silence_fails_its_streams_and_is_stopped_when_it_returns(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    await replica.claim("req_1")
    await replica.send(Tokens("req_1", 1, 0, [5], "Hi"))
    await next_event(generation)
    async with broker.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(control_channel("r1"))
        await pubsub.get_message(timeout=1)
        replica.stall()
        failed = await next_event(generation)
        assert isinstance(failed, Failed)
        assert failed.code == "worker_lost"
        async with asyncio.timeout(60):
            while (message := await pubsub.get_message(timeout=1)) is None:
                pass
    assert message["data"] == encode(("req_1", 0, 1))
    replica.resume()
    assert not await finish(broker, "r1", "req_1", 1)
    assert await outcomes(broker) == ["failed"]
    await eventually_async(lambda: serving(dispatcher))


async def test_unclaimed_requests_of_a_dead_replica_move(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    assert generation.target == "r1"
    replica.kill()
    other = Replica(broker, "r2")

    async def moved() -> bool:
        return generation.target == "r2" and await wakeups(broker, "r2") == 1

    await eventually_async(moved)
    assert await other.claim("req_1")
    await eventually_async(lambda: owned(generation, "r2"))
    assert dispatcher.placement.load("r1") == 0
    other.stall()


async def test_a_late_claim_by_the_first_replica_counts(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    other = Replica(broker, "r2")
    await eventually_async(lambda: two_serving(dispatcher))
    dispatcher.requeue(generation)  # as if the first were lost
    generation.target = "r2"
    await replica.claim("req_1")
    await eventually_async(lambda: owned(generation, "r1"))
    other.stall()


async def two_serving(dispatcher: Dispatcher) -> bool:
    return len(dispatcher.replicas.serving("m")) == 2


async def test_a_request_that_kills_its_replicas_fails(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    generation: Execution | None = None
    for attempt in (1, 2, 3):
        victim = Replica(broker, f"r{attempt}")
        await eventually_async(lambda: serving(dispatcher))
        generation = generation or await send(dispatcher, make_job())
        await eventually_async(partial(targeted, generation, victim.name))
        assert await victim.claim("req_1", attempt)
        await eventually_async(partial(owned, generation, victim.name))
        victim.kill()
    assert generation
    failed = await next_event(generation)
    assert isinstance(failed, Failed)
    assert failed.code == "not_served"
    api_error = ApiError(failed.code, failed.message)
    assert api_error.status == 500
    assert (b"x-should-retry", b"false") in api_error.headers()
    assert await outcomes(broker) == ["failed"]


async def targeted(generation: Execution, replica: str) -> bool:
    return generation.target == replica and generation.written


async def test_requests_waiting_for_a_cordoned_replica_move_to_another(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    assert generation.target == "r1"
    await broker.hset(CORDONS_KEY, "r1", "cordon")
    await eventually_async(lambda: queued(generation))
    other = Replica(broker, "r2")
    await eventually_async(lambda: sent_to(generation, "r2"))
    assert await other.claim("req_1")
    await eventually_async(lambda: owned(generation, "r2"))
    other.stall()


async def queued(generation: Execution) -> bool:
    return generation.is_queued


async def sent_to(generation: Execution, replica: str) -> bool:
    return generation.target == replica
