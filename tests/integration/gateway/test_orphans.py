"""Executions without a gateway that supervises them, with Valkey: each ends in one usage event, whatever was lost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio as redis

from inference_worker.contract import claims
from inference_worker.contract.messages import (
    USAGE_STREAM,
    BillingContext,
    End,
    ExecutionUsage,
    InferenceJob,
    Tokens,
    claim_key,
    control_channel,
    decode_usage,
    encode,
    event_log_key,
    gateway_stream,
)
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.apps.deployments.gateway_heartbeat import gateway_heartbeat_key
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.dispatch import orphans
from millrace.gateway.dispatch.dispatcher import EXECUTIONS_KEY, Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.monitor import DispatchMonitor
from millrace.gateway.dispatch.orphans import OrphanSweep
from tests.support.gateway.keys import make_demand, make_key
from tests.support.gateway.replica import GATEWAY, Replica
from tests.support.waiting import eventually_async


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(orphans, "GATEWAY_LOST_SECONDS", 0.3)
    monkeypatch.setattr(orphans, "OVERDUE_SECONDS", 0.1)


class Gateway:
    """A gateway's dispatcher and monitor, and one request of it."""

    def __init__(self, broker: redis.Redis, name: str) -> None:
        self.broker, self.name = broker, name
        self.dispatcher = Dispatcher(broker, broker, name, queue_seconds=5, retention_seconds=60)
        self._monitor = DispatchMonitor(self.dispatcher)

    async def start(self) -> None:
        await self.dispatcher.start()
        await self._monitor.start()

    async def stop(self) -> None:
        await self._monitor.stop()
        await self.dispatcher.stop()

    async def lose(self) -> None:
        """End without any cleanup, and let the heartbeat expire."""
        await self.stop()
        await self.broker.delete(gateway_heartbeat_key(self.name))

    async def send(self, request_id: str = "req_1", seconds: float = 60) -> Execution:
        billing_context = BillingContext(time.time_ns() // 1000, request_id, 0, 1, 1, 1, "m")
        job = InferenceJob(billing_context, self.name, [1, 2], SamplingParams(), b"salt", time.time() + seconds)
        admitted = AdmittedRequest(make_demand(make_key(), request_id), job.params.max_tokens)
        response_spec = ResponseSpec("completions", request_id, "m", 0, 2)
        execution = Execution(self.broker, admitted, job, response_spec, DecisionRecord())
        self.dispatcher.submit(execution)

        async def written() -> bool:
            return execution.written

        await eventually_async(written)
        return execution


@asynccontextmanager
async def running(broker: redis.Redis, name: str) -> AsyncIterator[Gateway]:
    gateway = Gateway(broker, name)
    await gateway.start()

    async def serving() -> bool:
        return bool(gateway.dispatcher.replicas.serving("m"))

    await eventually_async(serving)
    yield gateway
    await gateway.stop()


async def events(broker: redis.Redis) -> list[tuple[str, str, int]]:
    usages = [decode_usage(fields[b"e"]) for _, fields in await broker.xrange(USAGE_STREAM)]
    return [(usage.outcome, usage.finish_reason, usage.usage.total) for usage in usages]


async def finish(broker: redis.Redis, request_id: str = "req_1") -> bool:
    """End the execution as its worker does. Return whether the end counts."""
    job: Any = await broker.hget(claim_key(request_id, 0), "job")  # type: ignore[misc]
    context = orphans.decode_job(job).billing_context
    usage = TokenCounts(uncached=2, output=1)
    event = encode(ExecutionUsage(context, 1, "completed", "stop", usage, "r1", 0))
    end = End(request_id, 1, 1, "stop", None, usage)
    keys = [claim_key(request_id, 0), USAGE_STREAM, gateway_stream(GATEWAY), event_log_key(request_id, 1)]
    args = [1, event, encode([end]), 60, encode(end)]
    return await broker.eval(claims.FINISH, len(keys), *keys, *args) is not None  # type: ignore[misc]


async def is_swept(broker: redis.Redis) -> bool:
    return not await broker.exists(EXECUTIONS_KEY)


async def claim(gateway: Gateway, replica: Replica) -> None:
    assert await replica.claim("req_1")


async def begin(gateway: Gateway, replica: Replica) -> None:
    await claim(gateway, replica)
    await replica.send(Tokens("req_1", 1, 0, [5], "Hi"))


async def lose_gateway(gateway: Gateway, replica: Replica) -> None:
    await gateway.lose()


async def lose_worker(gateway: Gateway, replica: Replica) -> None:
    replica.kill()


async def complete(gateway: Gateway, replica: Replica) -> None:
    assert await finish(gateway.broker)


async def disconnect(gateway: Gateway, replica: Replica) -> None:
    execution = gateway.dispatcher.executions["req_1"]
    await gateway.dispatcher.cancel(execution)
    gateway.dispatcher.release(execution)


Step = Callable[[Gateway, Replica], Awaitable[None]]
LOST, DONE = ("failed", "worker_lost", 0), ("completed", "stop", 3)
CASES: dict[str, tuple[list[Step], tuple[str, str, int]]] = {
    "gateway, then worker": ([begin, lose_gateway, lose_worker], LOST),
    "worker, then gateway": ([begin, lose_worker, lose_gateway], LOST),
    "both, before the first token": ([claim, lose_gateway, lose_worker], LOST),
    "both, before the claim": ([lose_gateway, lose_worker], LOST),
    "gateway, before the claim": ([lose_gateway], LOST),
    "gateway; the worker completes": ([begin, lose_gateway, complete], DONE),
    "gateway after the end": ([begin, complete, lose_gateway], DONE),
    "gateway, then worker after the end": ([begin, lose_gateway, complete, lose_worker], DONE),
    "disconnect, then worker": ([begin, disconnect, lose_worker], LOST),
    "disconnect, then both": ([begin, disconnect, lose_gateway, lose_worker], LOST),
    "disconnect; the worker completes": ([begin, disconnect, complete], DONE),
    "no loss": ([begin, complete], DONE),
}


@pytest.mark.parametrize("case", CASES)
async def test_every_execution_ends_in_one_usage_event(broker: redis.Redis, case: str) -> None:
    steps, expected = CASES[case]
    replica = Replica(broker, "r1")
    async with running(broker, GATEWAY) as gateway, running(broker, "gw-b") as second, running(broker, "gw-c"):
        await gateway.send()
        for step in steps:
            await step(gateway, replica)
        await eventually_async(lambda: is_swept(broker))
        await OrphanSweep(second.dispatcher).sweep()
        assert await events(broker) == [expected]
        assert not await finish(broker) or expected == DONE  # a late end of the lost worker does not count
        replica.stall()


async def test_an_execution_that_a_gateway_supervises_is_not_touched(broker: redis.Redis) -> None:
    """Its own monitor decides, since it may have another replica for the execution."""
    replica = Replica(broker, "r1")
    async with running(broker, GATEWAY) as gateway, running(broker, "gw-b") as second:
        await gateway.send()
        sweep = OrphanSweep(second.dispatcher)
        for name in ("queued", "running"):
            await sweep.sweep()
            assert await broker.hget(claim_key("req_1", 0), "state") == name.encode()  # type: ignore[misc]
            await replica.claim("req_1")
        assert await events(broker) == []
        assert await broker.smembers(EXECUTIONS_KEY) == {b"gw-a req_1 0"}  # type: ignore[misc]
        replica.stall()


async def test_an_orphan_of_a_live_worker_ends_after_its_deadline(broker: redis.Redis) -> None:
    replica = Replica(broker, "r1")
    async with running(broker, GATEWAY) as gateway, running(broker, "gw-b"):
        await gateway.send(seconds=1)
        await begin(gateway, replica)
        async with broker.pubsub() as controls:
            await controls.subscribe(control_channel("r1"))
            await gateway.lose()
            await eventually_async(lambda: is_swept(broker))
            messages = [await controls.get_message(timeout=5) for _ in range(2)]
        assert messages[1] is not None
        assert messages[1]["data"] == encode(("req_1", 0, 1))
        assert await events(broker) == [("failed", "timeout", 0)]
        replica.stall()


async def test_an_outage_of_the_broker_loses_no_gateway(broker: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway is lost if it is silent while this gateway reads heartbeats."""
    replica = Replica(broker, "r1")
    async with running(broker, GATEWAY) as gateway, running(broker, "gw-b") as second:
        await gateway.send()
        sweep = OrphanSweep(second.dispatcher)
        now = time.monotonic()
        monkeypatch.setattr(orphans.time, "monotonic", lambda: now)
        await broker.delete(gateway_heartbeat_key(GATEWAY))
        await sweep.sweep()
        now += 60
        sweep._silent_since.clear()  # as after a failed round
        await sweep.sweep()
        assert await events(broker) == []
        replica.stall()
