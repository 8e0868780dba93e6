"""The dispatcher with Valkey, and the test as the worker: claims, streams, and what ends an execution."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis

from inference_worker.contract import claims
from inference_worker.contract.command_connection import CommandConnection
from inference_worker.contract.messages import (
    USAGE_STREAM,
    End,
    Failed,
    InferenceJob,
    Released,
    Tokens,
    claim_key,
    control_channel,
    decode_job,
    decode_usage,
    encode,
    replica_queue_key,
    wakeups_key,
)
from inference_worker.contract.request import ReasoningSpec, TokenCounts
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch import monitor
from millrace.gateway.dispatch.dispatcher import Dispatcher, decision_record_key
from tests.support.gateway.dispatching import make_job, next_event, outcomes, owned, send, submit, wakeups
from tests.support.gateway.replica import Replica
from tests.support.waiting import eventually_async


async def test_a_job_is_claimed_and_its_events_are_streamed(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())

    async def rung() -> bool:
        return await wakeups(broker) == 1

    await eventually_async(rung)
    assert await replica.claim("req_1")
    await eventually_async(lambda: owned(generation, "r1"))
    sent = [Tokens("req_1", 1, 0, [5], "Hi"), End("req_1", 1, 1, "stop", None, TokenCounts(2, output=1))]
    await replica.send(*sent)
    assert [await next_event(generation), await next_event(generation)] == sent
    assert dispatcher.placement.load("r1") == 0
    dispatcher.release(generation)
    assert dispatcher.in_flight == 0


async def test_a_job_names_another_replica_with_the_cached_prefix(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    replicas = {name: Replica(broker, name) for name in ("r1", "r2")}
    await eventually_async(lambda: both_serve(dispatcher))
    job = make_job("req_1")
    started = await send(dispatcher, msgspec.structs.replace(job, prompt_token_ids=[7] * 80))
    first = started.target
    assert first is not None
    assert (await stored(broker, "req_1")).replicas_with_prefix == ()
    assert await replicas[first].claim("req_1")
    await replicas[first].send(Tokens("req_1", 1, 0, [5], "Hi"))
    await next_event(started)
    replicas[first].running = 8  # and one queued, so it has no credit left

    async def full() -> bool:
        return dispatcher.placement.load(first) >= 8

    await eventually_async(full)
    spilt = await send(dispatcher, msgspec.structs.replace(make_job("req_2"), prompt_token_ids=[7] * 90))
    assert spilt.target != first
    assert (await stored(broker, "req_2")).replicas_with_prefix == (first,)
    for each in replicas.values():
        each.stall()


async def both_serve(dispatcher: Dispatcher) -> bool:
    return len(dispatcher.replicas.find_ready("m")) == 2


async def stored(broker: redis.Redis, request_id: str) -> InferenceJob:
    payload: Any = await broker.hget(claim_key(request_id, 0), "job")
    return decode_job(payload)


async def test_without_a_replica_a_request_is_rejected_early(dispatcher: Dispatcher) -> None:
    with pytest.raises(ApiError) as exc_info:
        dispatcher.require_capacity("m", 1)
    assert (exc_info.value.status, exc_info.value.code) == (503, "model_loading")
    assert exc_info.value.retry_after


async def test_a_request_returned_by_a_draining_worker_is_sent_again(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    await replica.claim("req_1")
    await broker.eval(claims.ABANDON, 1, claim_key("req_1", 0), 1, "r1")
    before = await wakeups(broker)
    await replica.send(Released("req_1", 2))

    async def rung_again() -> bool:
        return await wakeups(broker) > before

    await eventually_async(rung_again)
    assert generation.attempt == 2
    assert await Replica(broker, "r2").claim("req_1", 2)


async def test_lost_messages_are_read_from_the_claim(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the claim nor the requeue reached the gateway."""
    monkeypatch.setattr(monitor, "FIRST_RENOTIFY_SECONDS", 0.2)
    claimed = await send(dispatcher, make_job("req_1"))
    handed_back = await send(dispatcher, make_job("req_2"))
    for name in ("req_1", "req_2"):
        await broker.eval(claims.CLAIM, 1, claim_key(name, 0), 1, "r1")
    await broker.eval(claims.ABANDON, 1, claim_key("req_2", 0), 1, "r1")

    async def caught_up() -> bool:
        return claimed.owner == "r1" and handed_back.attempt == 2

    await eventually_async(caught_up)
    replica.kill()

    async def given_up() -> bool:
        return claimed.attempt == 2

    await eventually_async(given_up)


@pytest.mark.usefixtures("replica")
async def test_a_lost_wakeup_is_sent_again(
    broker: redis.Redis, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "FIRST_RENOTIFY_SECONDS", 0.3)
    await send(dispatcher, make_job())

    async def rung() -> bool:
        return await wakeups(broker) > 0

    await eventually_async(rung)
    await broker.delete(replica_queue_key("r1"), wakeups_key("r1"))
    await eventually_async(rung)
    await broker.delete(replica_queue_key("r1"), wakeups_key("r1"))
    await asyncio.sleep(1)
    assert not await rung()  # the next one comes later


@pytest.mark.usefixtures("replica")
async def test_an_unclaimed_request_is_rejected_after_the_timeout(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    generation = await send(dispatcher, make_job())
    failed = await next_event(generation)
    assert isinstance(failed, Failed)
    assert failed.code == "server_is_overloaded"
    assert await broker.hget(claim_key("req_1", 0), "state") == b"cancelled"


async def test_a_cancel_reaches_the_worker(broker: redis.Redis, dispatcher: Dispatcher, replica: Replica) -> None:
    generation = await send(dispatcher, make_job())
    await replica.claim("req_1")
    async with broker.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(control_channel("r1"))
        await pubsub.get_message(timeout=1)
        await dispatcher.cancel(generation)
        async with asyncio.timeout(60):
            while (message := await pubsub.get_message(timeout=1)) is None:
                pass
    assert message["data"] == encode(("req_1", 0, 1))


async def test_a_silent_execution_ends_at_the_deadline(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "OVERDUE_SECONDS", 0.1)
    generation = await send(dispatcher, make_job(seconds=0.5))
    await replica.claim("req_1")
    failed = await next_event(generation)
    assert isinstance(failed, Failed)
    assert failed.code == "timeout"
    assert await outcomes(broker) == ["failed"]


async def test_a_claim_that_the_broker_lost_is_written_again(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "FIRST_RENOTIFY_SECONDS", 0.2)
    generation = await send(dispatcher, make_job())
    await broker.delete(claim_key("req_1", 0))

    async def back() -> bool:
        return await broker.hget(claim_key("req_1", 0), "attempt") == b"2"

    await eventually_async(back)
    assert generation.attempt == 2
    assert not await replica.claim("req_1", 1)
    assert await replica.claim("req_1", 2)


async def test_the_reason_of_a_placement_is_recorded(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    await send(dispatcher, make_job(), decision_record=DecisionRecord(requested_model="name"))
    decision_record = msgspec.json.decode(await broker.get(decision_record_key("req_1")))
    assert decision_record["requested_model"] == "name"
    (execution,) = decision_record["executions"]
    assert (execution["replica"], execution["by"], execution["load"], execution["credits"], execution["attempt"]) == (
        "r1",
        "load",
        0,
        9,
        1,
    )


async def test_without_the_broker_a_request_is_rejected_and_its_reservation_released_later(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    unreachable: redis.Redis = redis.Redis.from_url("redis://127.0.0.1:1/0")
    kept = dispatcher.broker, dispatcher.commands
    dispatcher.broker, dispatcher.commands = unreachable, CommandConnection(unreachable)
    failed = await next_event(submit(dispatcher, make_job()))
    await asyncio.sleep(0.1)
    dispatcher.broker, dispatcher.commands = kept
    await eventually_async(partial(broker.xlen, USAGE_STREAM))
    ((_, fields),) = await broker.xrange(USAGE_STREAM)
    is_reported = decode_usage(fields[b"e"])
    assert (is_reported.outcome, is_reported.finish_reason, is_reported.usage.output) == ("cancelled", "never_ran", 0)
    assert isinstance(failed, Failed)
    assert failed.code == "server_is_overloaded"
    assert dispatcher.placement.load("r1") == 0
    await unreachable.aclose()


async def test_an_execution_that_cannot_be_written_does_not_stop_the_others(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    too_large = ReasoningSpec("think", budget=10**30)
    failing = submit(dispatcher, msgspec.structs.replace(make_job("req_1"), reasoning=too_large))
    same_batch = submit(dispatcher, make_job("req_2"))
    failed = await next_event(failing)
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    await send(dispatcher, make_job("req_3"))
    assert same_batch.written
    assert await wakeups(broker) == 2
    assert await outcomes(broker) == ["cancelled"]  # its reservation is released
    assert dispatcher.placement.load("r1") == 2
