"""The dispatcher's queues, with Valkey and the test as the worker: credits, turns of tenants, and the batch class.

A replica here has a batch of 8, so 9 credits.
"""

from __future__ import annotations

import msgspec
import pytest
import redis.asyncio as redis

from inference_worker.contract.messages import CORDONS_KEY, End, claim_key
from inference_worker.contract.request import ServiceClass, TokenCounts
from millrace.apps.deployments.gateway_heartbeat import GATEWAYS_KEY, decode_gateway_heartbeat, gateway_heartbeat_key
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from tests.support.gateway.dispatching import make_job, send, serving, submit
from tests.support.gateway.replica import GATEWAY, Replica
from tests.support.waiting import eventually_async


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
    assert await broker.hget(claim_key("full_0", 0), "state") == b"cancelled"


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


@pytest.mark.usefixtures("replica")
async def test_gateways_report_their_queues(broker: redis.Redis, dispatcher: Dispatcher) -> None:
    await broker.hset(CORDONS_KEY, "r1", "cordon")
    await send(dispatcher, make_job())

    async def is_reported() -> bool:
        payload = await broker.get(gateway_heartbeat_key(GATEWAY))
        presence = None if payload is None else decode_gateway_heartbeat(payload)
        return presence is not None and [(w.model, w.requests) for w in presence.waiting] == [("m", 1)]

    await eventually_async(is_reported)
    assert await broker.smembers(GATEWAYS_KEY) == {GATEWAY.encode()}
    assert 0 < await broker.pttl(gateway_heartbeat_key(GATEWAY)) <= 5000
