"""Supervision of replicas and executions, twice a second.

Reads heartbeats and reported exits, handles lost and suspected replicas, sends unclaimed executions again and fails
expired ones. Each step can fail half-way: the next look continues.

- Lost replica: an execution without an event gets another attempt, a begun one fails.
- Suspected replica: an execution without an event gets another attempt if another replica takes work. A begun one
  continues: its tokens arrive when the replica answers again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import redis.asyncio as redis
import structlog

from inference_worker.contract import claims
from inference_worker.contract.messages import (
    CORDONS_KEY,
    EXITS_KEY,
    HEARTBEAT_SECONDS,
    REPLICAS_KEY,
    USAGE_STREAM,
    claim_key,
    control_channel,
    encode,
    replica_queue_keys,
)
from millrace.apps.operations.gateway_heartbeat import GatewayHeartbeat, QueueDepth, send_gateway_heartbeat
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import OVERLOADED
from millrace.gateway.dispatch.dispatched_execution import DispatchedExecution
from millrace.gateway.dispatch.dispatcher import Dispatcher

log = structlog.get_logger(__name__)

RING_AGAIN_SECONDS = 5.0
OVERDUE_SECONDS = 5.0  # after its deadline an execution whose worker said nothing is given up
MAX_LOST_REPLICAS = 3  # replicas that may die with one request: more, and it is the request that kills them
MAX_MOVES = 2  # away from suspected replicas: then it is likely the request that makes them silent, and it stays
WORKER_LOST = "The worker that served this request was lost; please send it again."
NOT_SERVED = f"{MAX_LOST_REPLICAS} workers were lost while they served this request; it is not tried again."


class DispatchMonitor:
    """Looks after one dispatcher's generations."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._broker = dispatcher.broker
        self._replicas = dispatcher.replicas
        self._withdraw_script = self._broker.register_script(claims.WITHDRAW)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    async def _run(self) -> None:
        look = 0
        while True:
            try:
                died = await self._listen()
                await self._dispatcher.tell_untold()
                self._dispatcher.placement.observe()
                for model in {model for model, _ in self._dispatcher.queues}:
                    self._dispatcher.pump(model)
                await self._answer_for(died)
                await self._end_overdue()
                await self._ring_again()
                look += 1
                if look % 20 == 0:
                    await self._keep_house()
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                self._replicas.reprieve()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _listen(self) -> set[str]:
        """Hear the replicas and what operators want of them, and say how this gateway does; who died or left."""
        async with self._broker.pipeline(transaction=False) as pipe:
            pipe.hgetall(REPLICAS_KEY)
            pipe.hkeys(CORDONS_KEY)
            pipe.zrange(EXITS_KEY, 0, -1)
            send_gateway_heartbeat(pipe, self._dispatcher.gateway_id, self._presence())
            beats, cordoned, exited, *_ = await pipe.execute()
        return self._replicas.update(beats, cordoned, exited)

    def _presence(self) -> GatewayHeartbeat:
        now = time.monotonic()
        waiting: dict[tuple[str, bool], list[float]] = {}
        for execution in self._executions():
            if execution.queued:
                waiting.setdefault((execution.model, execution.batch), []).append(now - execution.waiting_since)
        told = (QueueDepth(*kind, len(waits), round(max(waits) * 1000)) for kind, waits in sorted(waiting.items()))
        return GatewayHeartbeat(self._dispatcher.in_flight, tuple(told))

    async def _keep_house(self) -> None:
        await self._dispatcher.reader.create()
        for queue in self._dispatcher.queues.values():
            queue.forget_idle()
        if forgotten := self._replicas.forgotten():
            keys = [key for replica_id in forgotten for key in replica_queue_keys(replica_id)]
            await self._broker.delete(*keys)
            await self._broker.hdel(REPLICAS_KEY, *forgotten)

    def _executions(self) -> list[DispatchedExecution]:
        return [each for each in self._dispatcher.generations.values() if not each.over]

    async def _answer_for(self, died: Collection[str]) -> None:
        for replica_id in died:
            log.warning("replica_lost", replica_id=replica_id)
        for generation in self._executions():
            owner = generation.owner
            # An owner that left the board without our seeing it die (a clean stop between two looks) is gone as well.
            if owner is None:
                continue
            if owner in died or self._replicas.is_dead(owner):
                await self._owner_lost(generation, owner)
            elif not generation.begun and self._replicas.is_suspected(owner):
                await self._move(generation, owner)

    async def _move(self, generation: DispatchedExecution, owner: str) -> None:
        """Give an execution without an event to another replica, if there is one."""
        if generation.moved < MAX_MOVES and self._replicas.serving(generation.model):
            if await self._restart(generation, owner):
                generation.moved += 1
            else:
                await self._catch_up(generation)

    async def _restart(self, generation: DispatchedExecution, owner: str) -> bool:
        """Let another attempt answer. The claim decides: from then on the owner's attempt is neither read nor billed.

        Returns:
            False if the owner no longer has the claim.
        """
        dispatcher = self._dispatcher
        key, stale = claim_key(generation.request_id, generation.execution), generation.attempt
        attempt = await dispatcher.abandon_script(keys=[key], args=[stale, owner])
        if attempt is None:
            return False
        if generation.begun:  # its first token arrived during the call
            await dispatcher.fail(generation.job, int(attempt), "worker_lost")
            dispatcher.fail_here(generation, "worker_lost", WORKER_LOST)
        else:
            dispatcher.restart(generation, int(attempt))
        await self._stop_owner(generation, owner, stale)
        return True

    async def _stop_owner(self, generation: DispatchedExecution, owner: str, attempt: int) -> None:
        """Stop the owner's attempt, which no client waits for: the owner may only have been silent."""
        stop = encode((generation.request_id, generation.execution, attempt))
        await self._broker.publish(control_channel(owner), stop)

    async def _owner_lost(self, generation: DispatchedExecution, owner: str) -> None:
        dispatcher = self._dispatcher
        killer = not generation.begun and generation.lost + 1 >= MAX_LOST_REPLICAS
        if not generation.begun and not killer:
            if await self._restart(generation, owner):
                generation.lost += 1
                return
            if await self._catch_up(generation):
                return
        code, message = ("not_served", NOT_SERVED) if killer else ("worker_lost", WORKER_LOST)
        if await dispatcher.fail(generation.job, generation.attempt, code):
            dispatcher.fail_here(generation, code, message)
            await self._stop_owner(generation, owner, generation.attempt)
        else:
            generation.buffer.refill()
            dispatcher.finish(generation)

    async def _end_overdue(self) -> None:
        now, wall = time.monotonic(), time.time()
        dispatcher = self._dispatcher
        for generation in self._executions():
            late = now - generation.waiting_since > dispatcher.queue_seconds
            if late and (generation.queued or generation.unclaimed) and await self._withdraw(generation):
                fault = dispatcher.overloaded(generation.model, None)
                dispatcher.fail_here(generation, OVERLOADED, fault.message, retry_after=fault.retry_after)
        for generation in list(dispatcher.generations.values()):
            if not generation.overdue and wall > generation.job.deadline + OVERDUE_SECONDS:
                await dispatcher.fail(generation.job, generation.attempt, "timeout")
                generation.overdue = True
                dispatcher.fail_here(generation, "timeout", "The request ran past its deadline.")

    async def _withdraw(self, generation: DispatchedExecution) -> bool:
        """Take back what nobody has claimed. False: somebody has."""
        if not generation.written:
            if generation.queued:
                await self._dispatcher.never_ran(generation.job.billing_context)
            return generation.queued
        key = claim_key(generation.request_id, generation.execution)
        return bool(await self._withdraw_script(keys=[key, USAGE_STREAM]))

    async def _ring_again(self) -> None:
        """For what nobody has claimed: its wakeup may lie, taken but unread, in a replica that is gone."""
        now = time.monotonic()
        for generation in self._executions():
            if not generation.unclaimed or not generation.written:
                continue
            elsewhere = generation.target is None or not self._replicas.takes_work(generation.target)
            due = elsewhere or now - generation.rung_at > RING_AGAIN_SECONDS
            if not due or await self._catch_up(generation) or not generation.unclaimed:
                continue
            if elsewhere:
                self._dispatcher.requeue(generation)
            else:
                self._dispatcher.ring_again(generation)

    async def _catch_up(self, generation: DispatchedExecution) -> bool:
        """Read from the claim what a lost event would have told: who works on it, or that a later attempt counts.
        False if there was nothing to learn."""
        claim: Any = await self._broker.hmget(
            claim_key(generation.request_id, generation.execution), "attempt", "state", "owner"
        )
        attempt, state, owner = claim
        if attempt is None:  # the broker has lost it
            generation.written = False
            self._dispatcher.restart(generation, generation.attempt + 1)
            return True
        if int(attempt) > generation.attempt:
            self._dispatcher.restart(generation, int(attempt))
            return True
        if state == b"running" and owner is not None:
            self._dispatcher.set_owner(generation, owner.decode())
            return True
        return False
