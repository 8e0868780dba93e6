"""From an admitted request to the replica that answers it, and what happens when that replica does not.

An execution waits in its model's queue, fair between tenants, until a replica has a credit for it; so no long queue
stands in the broker, before the engines' own fair queues. It is then written to its claim record and a wakeup rings at
the replica. Wakeups may be lost, late or doubled; claiming is a compare-and-set (inference_worker.contract.claims), so
the only care needed is to ring again. The watch over all this is in millrace.gateway.dispatch.monitor.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract import claims
from inference_worker.contract.messages import (
    USAGE_STREAM,
    BillingContext,
    Claimed,
    End,
    ExecutionUsage,
    Failed,
    InferenceJob,
    Released,
    StreamEvent,
    claim_key,
    control_channel,
    encode,
)
from inference_worker.contract.request import TokenUsage
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.dispatch.dispatched_execution import DispatchedExecution, DispatchRequest
from millrace.gateway.dispatch.placement import Placement
from millrace.gateway.dispatch.queues import FairQueue, QueueFull
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from millrace.gateway.dispatch.streams import StreamReader
from millrace.gateway.dispatch.wakeups import Wakeup, WakeupBuilder

log = structlog.get_logger(__name__)

WRITE_BATCH_SIZE = 64
UNKNOWN_WAIT = 5.0  # seconds told to come back after, before anything was measured
_PACE = 0.1  # how far one request moves the measured duration


def why_key(request_id: str) -> str:
    """Where the record of a request's decisions is kept, as JSON, for as long as its stream."""
    return f"millrace:decisions:{request_id}"


class Dispatcher:
    """The generations in flight in this gateway."""

    def __init__(
        self,
        broker: redis.Redis,
        patient: redis.Redis,
        gateway_id: str,
        *,
        queue_seconds: float,
        keep_seconds: int,
        most_queued: int = 256,
    ) -> None:
        """`patient` is a client that may block on the broker for seconds."""
        self.broker = broker
        self.gateway_id = gateway_id
        self.queue_seconds = queue_seconds
        self._keep_seconds = keep_seconds
        self._most_queued = most_queued
        self.generations: dict[str, DispatchedExecution] = {}
        self.queues: dict[
            tuple[str, bool], FairQueue[DispatchedExecution]
        ] = {}  # by model, and whether of the batch class
        self._seconds: dict[str, float] = {}  # model -> how long an execution takes, from being sent to its end
        self._outbox: list[DispatchedExecution] = []
        self._to_send = asyncio.Event()
        self._untold: list[bytes] = []  # usage events that the broker has not taken yet
        self._wakeups = WakeupBuilder()
        self.reader = StreamReader(patient, gateway_id, self._accept, self._on_gap)
        self.abandon_script = broker.register_script(claims.ABANDON)
        self._fail_script = broker.register_script(claims.FAIL)
        self._cancel_script = broker.register_script(claims.CANCEL)
        self._tasks: list[asyncio.Task[None]] = []
        self.replicas = ReplicaRegistry()
        self.placement = Placement(self.replicas)

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self.reader.run()), asyncio.create_task(self._send_outbox())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    @property
    def in_flight(self) -> int:
        return len(self.generations)

    # In: a queue, fair between tenants, and out of it as replicas have credits.

    def require_room(self, model: str, tenant: int, weight: float = 1.0, *, batch: bool = False) -> None:
        """Refuse early what nobody could serve, or not in time.

        Raises:
            ApiError: 503, with when to come back.
        """
        if not self.replicas.serving(model):
            raise ApiError("model_loading", f"The model {model!r} is not ready yet; please try again.", retry_after=2)
        queue = self._queue(model, batch=False)
        if batch or not len(queue):  # batches wait as long as it takes
            return
        wait = self._wait(model, tenant, weight)
        if queue.full(tenant) or (wait or 0) > self.queue_seconds:
            raise self.overloaded(model, wait)

    def overloaded(self, model: str, wait: float | None) -> ApiError:
        seconds = max(1.0, UNKNOWN_WAIT if wait is None else min(wait, 60.0))
        return ApiError(OVERLOADED, f"The model {model!r} is busy; please try again later.", retry_after=seconds)

    def submit(self, dispatch_request: DispatchRequest) -> DispatchedExecution:
        """Put an execution in its queue. What becomes of it, its events say.

        Raises:
            ApiError: 503, the tenant's queue is full.
        """
        generation = DispatchedExecution(dispatch_request, self.broker)
        model, tenant = generation.model, generation.tenant
        try:
            queue = self._queue(model, generation.batch)
            queue.put(tenant, dispatch_request.weight, dispatch_request.cost, generation, long=dispatch_request.long)
        except QueueFull:
            raise self.overloaded(model, self._wait(model, tenant, dispatch_request.weight)) from None
        self.generations[generation.request_id] = generation
        self.pump(model)
        return generation

    def release(self, generation: DispatchedExecution) -> None:
        """Its events are no longer wanted here."""
        if self.generations.get(generation.request_id) is generation:
            del self.generations[generation.request_id]
        self.finish(generation)

    def pump(self, model: str) -> None:
        """Send what replicas have credits for; batches' requests when nothing else waits."""
        for batch in (False, True):
            self._pump(model, self._queue(model, batch))
            if len(self._queue(model, batch)):
                return

    def _pump(self, model: str, queue: FairQueue[DispatchedExecution]) -> None:
        while (generation := queue.peek()) is not None:
            choice = self.placement.choose(generation.job)
            if choice is None:
                return
            queue.pop()
            waited = time.monotonic() - generation.waiting_since
            generation.queued, generation.target = False, choice.replica_id
            generation.sent_at = time.monotonic()
            generation.start = choice.start
            if choice.replicas_with_prefix and not generation.written:
                generation.job = msgspec.structs.replace(
                    generation.job, replicas_with_prefix=choice.replicas_with_prefix
                )
            self.placement.sent(choice.replica_id, batch=generation.batch)
            executions = generation.dispatch_request.why.setdefault("executions", [])
            executions.append(
                {
                    "execution": generation.execution,
                    "attempt": generation.attempt,
                    "model": model,
                    "replica": choice.replica_id,
                    "by": choice.by,
                    "load": choice.load,
                    "credits": choice.credits,
                    "queued_ms": round(waited * 1000),
                }
            )
            self._outbox.append(generation)
            self._to_send.set()

    def requeue(self, generation: DispatchedExecution) -> None:
        """Send it to another replica, before all others: it had its turn."""
        self._leave_replica(generation)
        if not generation.over:
            generation.queued, generation.waiting_since = True, time.monotonic()
            queue = self._queue(generation.model, generation.batch)
            queue.put_back(generation.tenant, generation.dispatch_request.weight, generation)
            self.pump(generation.model)

    def restart(self, generation: DispatchedExecution, attempt: int) -> None:
        """Another attempt is to answer from the start."""
        generation.buffer.restart(attempt)
        self.requeue(generation)

    def ring_again(self, generation: DispatchedExecution) -> None:
        """Send the wakeup again, since it may be lost."""
        generation.rung_at = time.monotonic()
        self._outbox.append(generation)
        self._to_send.set()

    def set_owner(self, generation: DispatchedExecution, replica_id: str) -> None:
        """Learn who claimed it."""
        if generation.owner == replica_id:
            return
        if generation.target != replica_id:  # an earlier wakeup was answered after all
            self._leave_replica(generation)
            if generation.queued:
                self._queue(generation.model, generation.batch).remove(generation.tenant, generation)
                generation.queued = False
            generation.target = replica_id
            self.placement.sent(replica_id, batch=generation.batch)
        generation.owner = replica_id
        self.placement.claimed(replica_id, batch=generation.batch)

    def finish(self, generation: DispatchedExecution, used: int | None = None) -> None:
        """Nothing more is to come of it from a replica: its credit is free. `used`: tokens, if that is known."""
        if generation.over:
            return
        generation.over = True
        queue = self._queue(generation.model, generation.batch)
        if generation.queued:
            queue.remove(generation.tenant, generation)
            generation.queued = False
        if used is not None:
            queue.refund(generation.tenant, max(0, generation.dispatch_request.cost - used))
        if used is not None and not generation.batch:
            took = time.monotonic() - generation.sent_at
            before = self._seconds.setdefault(generation.model, took)
            self._seconds[generation.model] = before + _PACE * (took - before)
        self._leave_replica(generation)
        self.pump(generation.model)

    def fail_here(
        self, generation: DispatchedExecution, code: str, message: str, *, retry_after: float | None = None
    ) -> None:
        """End it with a failure of which no log tells."""
        generation.retry_after = retry_after
        generation.buffer.fail(code, message, unsent=not generation.written)
        self.finish(generation)

    async def cancel(self, generation: DispatchedExecution) -> bool:
        """Stop the execution, wherever it is. A worker stops within two steps and settles what it generated: then its
        end is still to come, and this is True."""
        if generation.over:
            return False
        if generation.queued:
            self.finish(generation)
            if not generation.written:
                await self.never_ran(generation.job.billing_context)
                return False
        return await self.cancel_claim(generation.request_id, generation.execution)

    async def cancel_claim(self, request_id: str, execution: int) -> bool:
        """Cancel an execution that another gateway may have dispatched."""
        running = await self._cancel_script(keys=[claim_key(request_id, execution), USAGE_STREAM])
        if running is None:
            return False
        owner, attempt = running
        await self.broker.publish(control_channel(owner.decode()), encode((request_id, execution, int(attempt))))
        return True

    async def tell_to_stop(self, generation: DispatchedExecution) -> None:
        """Tell the replica that works on the execution, whatever its claim says."""
        if generation.owner is not None:
            stop = encode((generation.request_id, generation.execution, generation.attempt))
            await self.broker.publish(control_channel(generation.owner), stop)

    async def fail(self, job: InferenceJob, attempt: int, code: str, *, in_any_case: bool = False) -> bool:
        """Record that the execution failed, before anybody is told. False if it ended otherwise: its log says how. What
        it pinned goes with it; `in_any_case`, also when it ended otherwise."""
        keys = [claim_key(job.billing_context.request_id, job.billing_context.execution), USAGE_STREAM]
        args: list[str | int | bytes] = [attempt, self._failed(job, attempt, code)]
        return bool(await self._fail_script(keys=keys, args=args + ["unpin"] * in_any_case) == 1)

    async def fail_however_it_ended(self, job: InferenceJob, attempt: int, code: str) -> None:
        """Mark the execution as failed even if it has ended; settled usage is reversed. While the
        broker is away this waits, as `never_ran` does."""
        try:
            if await self.fail(job, attempt, code, in_any_case=True):
                return
        except (redis.RedisError, OSError) as exc:
            log.warning("failure_record_failed", **job.billing_context.log_fields(), error=str(exc))
        self._untold.append(self._failed(job, attempt, code))
        await self.tell_untold()

    async def never_ran(self, *executions: BillingContext) -> None:
        """Tell the settler of executions that nobody answers: their holds go back; and should a worker have been asked
        all the same, nobody pays. While the broker is away they wait; if the gateway dies before, the reaper takes
        back.
        """
        self._untold += [self._void(execution) for execution in executions]
        try:
            await self.tell_untold()
        except (redis.RedisError, OSError) as exc:
            log.warning("reservation_release_failed", executions=len(self._untold), error=str(exc))

    async def tell_untold(self) -> None:
        """Send the usage events that are left. What is told twice is settled once."""
        if not self._untold:
            return
        telling, self._untold = self._untold, []
        try:
            async with self.broker.pipeline(transaction=False) as pipe:
                for event in telling:
                    pipe.xadd(USAGE_STREAM, {"e": event})
                await pipe.execute()
        except BaseException:
            self._untold = telling + self._untold
            raise

    def _failed(self, job: InferenceJob, attempt: int, code: str) -> bytes:
        return encode(
            ExecutionUsage(job.billing_context, attempt, "failed", code, TokenUsage(), f"gateway.{self.gateway_id}", 0)
        )

    def _void(self, execution: BillingContext) -> bytes:
        return encode(
            ExecutionUsage(execution, 0, "cancelled", "never_ran", TokenUsage(), f"gateway.{self.gateway_id}", 0)
        )

    def _queue(self, model: str, batch: bool) -> FairQueue[DispatchedExecution]:
        queue = self.queues.get((model, batch))
        if queue is None:
            queue = self.queues[model, batch] = FairQueue(self._most_queued)
        return queue

    def _wait(self, model: str, tenant: int, weight: float) -> float | None:
        """Seconds until a request of the tenant would be sent, as things go. None: nothing is known yet."""
        seconds = self._seconds.get(model)
        at_work = sum(self.placement.ours(replica_id) for replica_id in self.replicas.ready(model))
        if seconds is None or not at_work:
            return None
        queue = self._queue(model, batch=False)
        return (queue.waiting(tenant) + 1) * seconds / at_work / queue.share(tenant, weight)

    def _leave_replica(self, generation: DispatchedExecution) -> None:
        if generation.target is not None:
            self.placement.ended(generation.target, claimed=generation.owner is not None, batch=generation.batch)
        generation.target = generation.owner = None

    async def _send_outbox(self) -> None:
        while True:
            await self._to_send.wait()
            batch, self._outbox = self._outbox[:WRITE_BATCH_SIZE], self._outbox[WRITE_BATCH_SIZE:]
            if not self._outbox:
                self._to_send.clear()
            left = [
                generation.job.billing_context for generation in batch if generation.over and not generation.written
            ]
            if left:
                await self.never_ran(*left)
            batch = [generation for generation in batch if not generation.over]
            try:
                await self._write(batch)
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                for generation in batch:
                    self.fail_here(generation, OVERLOADED, "The service is briefly unavailable.", retry_after=1)
                await self.never_ran(*(generation.job.billing_context for generation in batch))
                continue
            for generation in batch:
                generation.written = True
                if generation.over and generation.owner is None:  # its client left meanwhile, and found nothing
                    await self._cancel_quietly(generation)

    async def _write(self, batch: list[DispatchedExecution]) -> None:
        """Write the executions' claims, then ring for them."""
        by_replica: defaultdict[str, list[Wakeup]] = defaultdict(list)
        async with self.broker.pipeline(transaction=False) as pipe:
            for generation in batch:
                if generation.target is not None:
                    wakeup = (generation.request_id, generation.execution, generation.attempt)
                    by_replica[generation.target].append(wakeup)
                job, dispatch_request = generation.job, generation.dispatch_request
                key = claim_key(generation.request_id, generation.execution)
                seconds = max(1, round(job.deadline - time.time())) + self._keep_seconds
                if not generation.written:
                    record: dict[Any, Any] = {
                        "attempt": generation.attempt,
                        "state": "queued",
                        "gateway": self.gateway_id,
                        "tenant": generation.tenant,
                        "job": encode(job),
                        "form": dispatch_request.form,
                        "not_started_event": self._void(job.billing_context),
                    }
                    pipe.hset(key, mapping=record)
                    pipe.expire(key, seconds)
                if generation.execution:
                    pipe.hset(claim_key(generation.request_id, 0), "execution", str(generation.execution))
                pipe.set(why_key(generation.request_id), msgspec.json.encode(dispatch_request.why), ex=seconds)
            for replica_id, wakeups in by_replica.items():
                queue, messages = self._wakeups.make(replica_id, wakeups)
                pipe.lpush(queue, *messages)
            await pipe.execute()

    async def _cancel_quietly(self, generation: DispatchedExecution) -> None:
        try:
            await self.cancel_claim(generation.request_id, generation.execution)
        except redis.RedisError as exc:
            log.warning("cancellation_failed", request_id=generation.request_id, error=str(exc))

    # Back: what replicas say.

    def _accept(self, event: StreamEvent) -> None:
        generation = self.generations.get(event.request_id)
        if generation is None:
            return
        if isinstance(event, Released):
            if not generation.begun and event.attempt == generation.attempt + 1:
                self.restart(generation, event.attempt)
        elif event.attempt != generation.attempt:
            return  # of a replica that was given up
        elif isinstance(event, Claimed):
            self.set_owner(generation, event.replica_id)
        else:
            if generation.start and generation.target and not (generation.begun or isinstance(event, Failed)):
                self.placement.computed(generation.start, generation.target)
            generation.begun = True
            generation.buffer.put(event)
            if isinstance(event, End):
                self.finish(generation, event.usage.prompt + event.usage.output)
            elif isinstance(event, Failed):
                self.finish(generation)

    def _on_gap(self) -> None:
        self.replicas.reprieve()
        for generation in self.generations.values():
            if not generation.queued:
                generation.buffer.refill()
