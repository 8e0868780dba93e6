"""The dispatcher with Valkey, and the test as the worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import redis.asyncio as redis

from inference_worker.contract import claims
from inference_worker.contract.command_connection import CommandConnection
from inference_worker.contract.messages import (
    CORDONS_KEY,
    USAGE_STREAM,
    BillingContext,
    End,
    ExecutionUsage,
    Failed,
    InferenceJob,
    Released,
    Tokens,
    claim_key,
    control_channel,
    decode_job,
    decode_usage,
    encode,
    event_log_key,
    gateway_stream,
    replica_queue_key,
    wakeups_key,
)
from inference_worker.contract.request import ReasoningSpec, SamplingParams, ServiceClass, TokenCounts
from millrace.apps.deployments.gateway_heartbeat import GATEWAYS_KEY, decode_gateway_heartbeat, gateway_heartbeat_key
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.dispatch import monitor, replicas
from millrace.gateway.dispatch.dispatcher import Dispatcher, decision_record_key
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.monitor import DispatchMonitor
from tests.support.gateway.keys import make_demand, make_key
from tests.support.gateway.replica import GATEWAY, Replica
from tests.support.waiting import eventually_async


def make_job(request_id: str = "req_1", seconds: float = 60, tenant: int = 1) -> InferenceJob:
    billing_context = BillingContext(time.time_ns() // 1000, request_id, 0, tenant, 1, 1, "m")
    return InferenceJob(billing_context, GATEWAY, [1, 2], SamplingParams(), b"salt", time.time() + seconds)


@pytest_asyncio.fixture
async def dispatcher(broker: redis.Redis) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(broker, broker, GATEWAY, queue_seconds=5, retention_seconds=60, max_queued=3)
    watching = DispatchMonitor(dispatcher)
    await dispatcher.start()
    await watching.start()
    yield dispatcher
    await watching.stop()
    await dispatcher.stop()


@pytest_asyncio.fixture
async def replica(broker: redis.Redis, dispatcher: Dispatcher) -> AsyncIterator[Replica]:
    replica = Replica(broker, "r1")
    await eventually_async(lambda: serving(dispatcher))
    yield replica
    replica.stall()


async def serving(dispatcher: Dispatcher) -> bool:
    return bool(dispatcher.replicas.serving("m"))


def submit(dispatcher: Dispatcher, job: InferenceJob, decision_record: DecisionRecord | None = None) -> Execution:
    """Submit an execution of the job."""
    billing_context = job.billing_context
    admitted = AdmittedRequest(make_demand(make_key(), billing_context.request_id), job.params.max_tokens)
    response_spec = ResponseSpec("completions", billing_context.request_id, billing_context.model, 0, 2)
    execution = Execution(dispatcher.broker, admitted, job, response_spec, decision_record or DecisionRecord())
    dispatcher.submit(execution)
    return execution


async def send(dispatcher: Dispatcher, job: InferenceJob, **changes: Any) -> Execution:
    """Submit an execution and wait until its claim is written."""
    generation = submit(dispatcher, job, **changes)

    async def written() -> bool:
        return generation.written or generation.is_queued

    await eventually_async(written)
    return generation


async def owned(generation: Execution, replica: str | None) -> bool:
    return generation.owner == replica


async def next_event(generation: Execution) -> Tokens | End | Failed:
    async with asyncio.timeout(60):
        return await generation.next_event()


async def wakeups(broker: redis.Redis, replica: str = "r1") -> int:
    tasks, others = await broker.llen(replica_queue_key(replica)), await broker.llen(wakeups_key(replica))  # type: ignore[misc]
    return int(tasks + others)


async def outcomes(broker: redis.Redis) -> list[str]:
    return [decode_usage(fields[b"e"]).outcome for _, fields in await broker.xrange(USAGE_STREAM)]


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
    return decode_job(await broker.hget(claim_key(request_id, 0), "job"))  # type: ignore[misc]


async def test_without_a_replica_a_request_is_rejected_early(dispatcher: Dispatcher) -> None:
    with pytest.raises(ApiError) as exc_info:
        dispatcher.require_capacity("m", 1)
    assert (exc_info.value.status, exc_info.value.code) == (503, "model_loading")
    assert exc_info.value.retry_after


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
    await broker.rpush(event_log_key("req_1", 1), encode(end))  # type: ignore[misc]
    await broker.hset(claim_key("req_1", 0), "state", "done")  # type: ignore[misc]
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
    return await broker.eval(claims.FINISH, 4, *keys, *args) is not None  # type: ignore[misc]


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


async def test_a_request_returned_by_a_draining_worker_is_sent_again(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    await replica.claim("req_1")
    await broker.eval(claims.ABANDON, 1, claim_key("req_1", 0), 1, "r1")  # type: ignore[misc]
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
        await broker.eval(claims.CLAIM, 1, claim_key(name, 0), 1, "r1")  # type: ignore[misc]
    await broker.eval(claims.ABANDON, 1, claim_key("req_2", 0), 1, "r1")  # type: ignore[misc]

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
    assert await broker.hget(claim_key("req_1", 0), "state") == b"cancelled"  # type: ignore[misc]


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


# Queues and credits. A replica here has a batch of 8, so 9 credits.


async def fill(dispatcher: Dispatcher, count: int = 9, tenant: int = 1) -> list[Execution]:
    return [submit(dispatcher, make_job(f"full_{n}", tenant=tenant)) for n in range(count)]


async def test_no_more_requests_are_sent_than_credits(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generations = await fill(dispatcher, 12)
    await eventually_async(lambda: all_written(generations[:9]))
    assert [generation.is_queued for generation in generations] == [False] * 9 + [True] * 3
    assert await broker.exists(claim_key("full_9", 0)) == 0
    await replica.claim("full_0")
    await replica.send(End("full_0", 1, 0, "stop", None, TokenCounts(2, output=1)))

    async def went() -> bool:
        return generations[9].written and generations[10].is_queued

    await eventually_async(went)


async def test_requests_of_other_gateways_use_credits_too(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    busy = Replica(broker, "r1", running=5, waiting=2)
    await eventually_async(lambda: serving(dispatcher))
    generations = await fill(dispatcher, 4)
    assert [generation.is_queued for generation in generations] == [False, False, True, True]
    busy.running = 0
    await eventually_async(lambda: all_sent(generations))
    busy.stall()


async def all_written(generations: list[Execution]) -> bool:
    return all(generation.written for generation in generations)


async def all_sent(generations: list[Execution]) -> bool:
    return not any(generation.is_queued for generation in generations)


async def test_tenants_take_turns(dispatcher: Dispatcher, replica: Replica) -> None:
    await fill(dispatcher)
    first = [submit(dispatcher, make_job(f"a{n}", tenant=1)) for n in range(3)]
    later = [submit(dispatcher, make_job(f"b{n}", tenant=2)) for n in range(2)]
    for n in range(3):
        await replica.claim(f"full_{n}")
        await replica.send(End(f"full_{n}", 1, 0, "stop", None, TokenCounts(2, output=16)))

    async def three_went() -> bool:
        return sum(not generation.is_queued for generation in first + later) == 3

    await eventually_async(three_went)
    # The second tenant came later and had none yet; the first had nine.
    assert [generation.is_queued for generation in later] == [False, False]


@pytest.mark.usefixtures("replica")
async def test_a_tenants_queue_is_limited_and_overload_is_reported_early(dispatcher: Dispatcher) -> None:
    await fill(dispatcher, 12)
    for refused in (
        lambda: dispatcher.require_capacity("m", 1),
        lambda: submit(dispatcher, make_job("one_more")),
    ):
        with pytest.raises(ApiError) as exc_info:
            refused()
        assert (exc_info.value.status, exc_info.value.code) == (503, "server_is_overloaded")
        assert exc_info.value.retry_after
    dispatcher.require_capacity("m", 2)
    # Nine are running for 60 s each, and three are before it in the queue of the only tenant.
    dispatcher._seconds["m"] = 60.0
    with pytest.raises(ApiError) as exc_info:
        dispatcher.require_capacity("m", 1)
    assert exc_info.value.retry_after == pytest.approx(4 * 60 / 9)
    with pytest.raises(ApiError) as exc_info:
        dispatcher.require_capacity("m", 2)  # it would get half
    assert exc_info.value.retry_after == pytest.approx(2 * 60 / 9)


@pytest.mark.usefixtures("replica")
async def test_a_request_cancelled_in_the_queue_never_runs(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    generations = await fill(dispatcher, 11)
    assert not await dispatcher.cancel(generations[9])
    dispatcher.release(generations[9])
    assert not await dispatcher.cancel(generations[0])  # sent, but not claimed
    dispatcher.release(generations[0])

    async def next_went() -> bool:
        return generations[10].written

    await eventually_async(next_went)
    assert await broker.exists(claim_key("full_9", 0)) == 0
    assert await broker.hget(claim_key("full_0", 0), "state") == b"cancelled"  # type: ignore[misc]


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


async def test_a_claim_that_the_broker_lost_is_written_again(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "FIRST_RENOTIFY_SECONDS", 0.2)
    generation = await send(dispatcher, make_job())
    await broker.delete(claim_key("req_1", 0))

    async def back() -> bool:
        return await broker.hget(claim_key("req_1", 0), "attempt") == b"2"  # type: ignore[misc]

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


async def test_batch_requests_use_idle_capacity_only(dispatcher: Dispatcher, replica: Replica) -> None:
    """Nine fit: a batch of eight and one queued."""
    batch = {"service_class": ServiceClass.BATCH}
    lines = [submit(dispatcher, msgspec.structs.replace(make_job(f"line_{n}", tenant=n), **batch)) for n in range(12)]
    assert [line.is_queued for line in lines] == [False] * 9 + [True] * 3
    others = [submit(dispatcher, make_job(f"req_{n}", tenant=n)) for n in range(11)]
    assert [each.is_queued for each in others] == [False] * 9 + [True] * 2
    dispatcher.release(lines[0])
    assert lines[9].is_queued  # other classes come first
    for each in others[:3]:
        dispatcher.release(each)
    assert not any(each.is_queued for each in others)
    assert lines[9].is_queued  # still no room
    for each in others[3:]:
        dispatcher.release(each)
    assert [line.is_queued for line in lines] == [False] * 10 + [True] * 2
    for line in lines[1:]:
        dispatcher.release(line)
    assert dispatcher.placement.load("r1", batch=True) == 0


async def test_requests_waiting_for_a_cordoned_replica_move_to_another(
    broker: redis.Redis, dispatcher: Dispatcher, replica: Replica
) -> None:
    generation = await send(dispatcher, make_job())
    assert generation.target == "r1"
    await broker.hset(CORDONS_KEY, "r1", "cordon")  # type: ignore[misc]
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


@pytest.mark.usefixtures("replica")
async def test_gateways_report_their_queues(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    await broker.hset(CORDONS_KEY, "r1", "cordon")  # type: ignore[misc]
    await send(dispatcher, make_job())

    async def is_reported() -> bool:
        payload = await broker.get(gateway_heartbeat_key(GATEWAY))
        presence = None if payload is None else decode_gateway_heartbeat(payload)
        return presence is not None and [(w.model, w.requests) for w in presence.waiting] == [("m", 1)]

    await eventually_async(is_reported)
    assert await broker.smembers(GATEWAYS_KEY) == {GATEWAY.encode()}  # type: ignore[misc]
    assert 0 < await broker.pttl(gateway_heartbeat_key(GATEWAY)) <= 5000
