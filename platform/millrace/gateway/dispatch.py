"""From an admitted request to the worker that answers it, and what happens when that worker does not.

A leg is written to its claim record, then a doorbell rings for it: a Celery task, published by a feeder thread because
`apply_async` would block the event loop for 0.4 ms. Doorbells may be lost, late or doubled; claiming is a
compare-and-set (inference_worker.claims), so the only care needed is to ring again.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Collection
from typing import Any

import redis.asyncio as redis
import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from inference_worker import claims
from inference_worker.engine.request import TokenUsage
from inference_worker.protocol import (
    HEARTBEAT_SECONDS,
    REPLICAS_KEY,
    USAGE_STREAM,
    Claimed,
    End,
    Failed,
    Job,
    Released,
    Tokens,
    UsageEvent,
    claim_key,
    control_channel,
    encode,
    model_queue,
)
from millrace.gateway.cancelling import cancel_and_wait
from millrace.gateway.errors import OVERLOADED, ApiError
from millrace.gateway.replicas import ReplicaBoard
from millrace.gateway.streams import EventBuffer, LogEvent, StreamReader

log = structlog.get_logger(__name__)

RING_AGAIN_SECONDS = 5.0
OVERDUE_SECONDS = 5.0  # after its deadline a leg whose worker said nothing is given up
GENERATE = "millrace.generate"
WORKER_LOST = "The worker that served this request was lost; please send it again."


class Generation:
    """One leg this gateway is waiting for."""

    def __init__(self, job: Job, broker: redis.Redis) -> None:
        self.job = job
        self.request_id = job.envelope.request_id
        self.leg = job.envelope.leg
        self.buffer = EventBuffer(broker, self.request_id)
        self.owner: str | None = None
        self.begun = False  # an event of the current attempt was accepted: no other attempt may answer now
        self.ended = False
        self.dispatched_at = time.monotonic()
        self.rung_at = self.dispatched_at

    @property
    def attempt(self) -> int:
        return self.buffer.attempt

    async def next_event(self) -> LogEvent:
        return await self.buffer.get()


class Feeder:
    """The thread that publishes doorbells."""

    def __init__(self, broker_url: str) -> None:
        self._celery = Celery("gateway", broker=broker_url, set_as_current=False)
        self._celery.conf.update(task_serializer="json", broker_transport_options={"socket_keepalive": True})
        self._queue: queue.SimpleQueue[tuple[str, tuple[str, int, int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._thread.start()

    def ring(self, generation: Generation) -> None:
        model = generation.job.envelope.model
        self._queue.put((model, (generation.request_id, generation.leg, generation.attempt)))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._celery.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            model, doorbell = item
            # A task for each leg: a worker's thread waits for all a task names, so a task that named many would keep
            # its place in the worker until the longest of them had ended.
            try:
                self._celery.send_task(GENERATE, args=[[doorbell]], queue=model_queue(model))
            except (OperationalError, OSError) as fault:
                log.warning("doorbell_lost", request_id=doorbell[0], error=str(fault))  # it rings again


class Dispatcher:
    """The generations in flight in this gateway, and the watch over the replicas that serve them."""

    def __init__(
        self, broker: redis.Redis, broker_url: str, gateway_id: str, *, queue_seconds: float, keep_seconds: int
    ):
        self._broker = broker
        self._gateway_id = gateway_id
        self._queue_seconds = queue_seconds
        self._keep_seconds = keep_seconds
        self._generations: dict[str, Generation] = {}
        self._feeder = Feeder(broker_url)
        self._reader = StreamReader(broker, gateway_id, self._accept, self._on_gap)
        self._give_up_script = broker.register_script(claims.GIVE_UP)
        self._fail_script = broker.register_script(claims.FAIL)
        self._cancel_script = broker.register_script(claims.CANCEL)
        self._withdraw_script = broker.register_script(claims.WITHDRAW)
        self._tasks: list[asyncio.Task[None]] = []
        self.replicas = ReplicaBoard()

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._reader.run()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)
        await asyncio.to_thread(self._feeder.close)

    @property
    def in_flight(self) -> int:
        return len(self._generations)

    def require_replica(self, model: str) -> None:
        """Refuse early what nobody could serve.

        Raises:
            ApiError: 503, no replica of the model is ready.
        """
        if not self.replicas.serving(model):
            raise ApiError("model_loading", f"The model {model!r} is not ready yet; please try again.", retry_after=2)

    async def submit(self, job: Job, form: bytes) -> Generation:
        """Write the claim record and ring. `form` is what another gateway needs to write the same stream."""
        generation = Generation(job, self._broker)
        envelope = job.envelope
        key = claim_key(envelope.request_id, envelope.leg)
        record: dict[Any, Any] = {
            "attempt": 1,
            "state": "queued",
            "gateway": self._gateway_id,
            "tenant": envelope.tenant_id,
            "job": encode(job),
            "form": form,
        }
        seconds = max(1, round(job.deadline - time.time())) + self._keep_seconds
        self._generations[envelope.request_id] = generation
        try:
            async with self._broker.pipeline(transaction=False) as pipe:
                pipe.hset(key, mapping=record)
                pipe.expire(key, seconds)
                await pipe.execute()
        except redis.RedisError as fault:
            self._generations.pop(envelope.request_id, None)
            raise ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1) from fault
        except BaseException:  # the client has gone: nobody would ever take the generation off the list
            self._generations.pop(envelope.request_id, None)
            raise
        self._feeder.ring(generation)
        return generation

    def release(self, generation: Generation) -> None:
        """Its events are no longer wanted here."""
        self._generations.pop(generation.request_id, None)

    async def cancel(self, request_id: str, leg: int) -> None:
        """Stop the leg, wherever it is. A worker stops within two steps and settles what it generated."""
        running = await self._cancel_script(keys=[claim_key(request_id, leg)])
        if running is not None:
            owner, attempt = running
            await self._broker.publish(control_channel(owner.decode()), encode((request_id, leg, int(attempt))))

    async def fail(self, job: Job, attempt: int, code: str) -> bool:
        """Record that the leg failed, before anybody is told. False if it ended otherwise: its log says how."""
        usage = UsageEvent(job.envelope, attempt, "failed", code, TokenUsage(), f"gateway.{self._gateway_id}", 0)
        keys = [claim_key(job.envelope.request_id, job.envelope.leg), USAGE_STREAM]
        return bool(await self._fail_script(keys=keys, args=[attempt, encode(usage)]) == 1)

    def _accept(self, event: Claimed | Released | Tokens | End | Failed) -> None:
        generation = self._generations.get(event.request_id)
        if generation is None:
            return
        if isinstance(event, Released):
            if not generation.begun and event.attempt == generation.attempt + 1:
                self._restart(generation, event.attempt)
        elif event.attempt != generation.attempt:
            return  # of a replica that was given up
        elif isinstance(event, Claimed):
            generation.owner = event.replica_id
        else:
            generation.begun = True
            generation.buffer.put(event)

    def _restart(self, generation: Generation, attempt: int) -> None:
        generation.owner = None
        generation.buffer.restart(attempt)
        self._ring(generation)

    def _ring(self, generation: Generation) -> None:
        generation.rung_at = time.monotonic()
        self._feeder.ring(generation)

    def _on_gap(self) -> None:
        self.replicas.reprieve()
        for generation in self._generations.values():
            generation.buffer.refill()

    async def _watch(self) -> None:
        """Twice a second: hear the heartbeats, answer for the dead, ring again for what nobody has claimed."""
        beat = 0
        while True:
            try:
                beats: Any = await self._broker.hgetall(REPLICAS_KEY)
                died = self.replicas.update(beats)
                await self._answer_for(died)
                await self._end_overdue()
                await self._ring_again(urgent=bool(died))
                beat += 1
                if beat % 20 == 0:
                    await self._reader.create()
                    if forgotten := self.replicas.forgotten():
                        await self._broker.hdel(REPLICAS_KEY, *forgotten)
            except (redis.RedisError, OSError) as fault:
                log.warning("broker_unreachable", error=str(fault))
                self.replicas.reprieve()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _answer_for(self, died: Collection[str]) -> None:
        for replica_id in died:
            log.warning("replica_gone", replica_id=replica_id)
        for generation in list(self._generations.values()):
            owner = generation.owner
            # An owner that left the board without our seeing it die (a clean stop between two looks) is gone as well.
            if owner is not None and (owner in died or self.replicas.is_dead(owner)):
                await self._owner_lost(generation, owner)

    async def _owner_lost(self, generation: Generation, owner: str) -> None:
        if not generation.begun:
            key = claim_key(generation.request_id, generation.leg)
            attempt = await self._give_up_script(keys=[key], args=[generation.attempt, owner])
            if attempt is not None and generation.begun:  # its first token came while we asked
                await self.fail(generation.job, int(attempt), "worker_lost")
                generation.owner = None
                generation.buffer.fail("worker_lost", WORKER_LOST)
                return
            if attempt is not None:
                self._restart(generation, int(attempt))
                # Should it only have been slow, it need not go on.
                stale = encode((generation.request_id, generation.leg, int(attempt) - 1))
                await self._broker.publish(control_channel(owner), stale)
                return
            if await self._catch_up(generation):
                return
        failed = await self.fail(generation.job, generation.attempt, "worker_lost")
        generation.owner = None  # not before: should the broker fail us here, the next look tries again
        if failed:
            generation.buffer.fail("worker_lost", WORKER_LOST)
        else:
            generation.buffer.refill()

    async def _end_overdue(self) -> None:
        now, wall = time.monotonic(), time.time()
        for generation in list(self._generations.values()):
            key = claim_key(generation.request_id, generation.leg)
            waiting = generation.owner is None and not generation.begun
            late = waiting and now - generation.dispatched_at > self._queue_seconds
            if late and await self._withdraw_script(keys=[key]):
                generation.buffer.fail(OVERLOADED, "No worker was free in time; please try again later.")
            elif wall > generation.job.deadline + OVERDUE_SECONDS:
                await self.fail(generation.job, generation.attempt, "timeout")
                generation.buffer.fail("timeout", "The request ran past its deadline.")

    async def _ring_again(self, urgent: bool) -> None:
        """For what nobody has claimed: its doorbell may lie, taken but unread, in a worker that is gone."""
        now = time.monotonic()
        for generation in list(self._generations.values()):
            unclaimed = generation.owner is None and not generation.begun
            due = urgent or now - generation.rung_at > RING_AGAIN_SECONDS
            if unclaimed and due and not await self._catch_up(generation):
                self._ring(generation)

    async def _catch_up(self, generation: Generation) -> bool:
        """Read from the claim what a lost event would have told: who works on it, or that a later attempt counts.
        False if there was nothing to learn."""
        claim: Any = await self._broker.hmget(
            claim_key(generation.request_id, generation.leg), "attempt", "state", "owner"
        )
        attempt, state, owner = claim
        if attempt is not None and int(attempt) > generation.attempt:
            self._restart(generation, int(attempt))
            return True
        if state == b"running" and owner is not None:
            generation.owner = owner.decode()
            return True
        return False
