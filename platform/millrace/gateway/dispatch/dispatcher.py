"""The dispatcher: sends admitted executions to replicas and receives their events.

An execution waits in its model's queue, fair between tenants, until a replica has capacity for it. Therefore no long
queue forms in Valkey, ahead of the engines' own fair queues. The dispatcher then writes the claim record and sends a
wakeup to the replica. Wakeups may be lost, late or duplicated. Claiming is a compare-and-set
(inference_worker.contract.claims), so it is enough to send lost wakeups again. millrace.gateway.dispatch.monitor
supervises all of this.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection
from itertools import chain

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract import claims
from inference_worker.contract.command_connection import Command, CommandConnection
from inference_worker.contract.messages import (
    USAGE_STREAM,
    AnswerEvent,
    BillingContext,
    Claimed,
    End,
    ExecutionUsage,
    Failed,
    InferenceJob,
    Released,
    StreamEvent,
    Wakeup,
    claim_key,
    control_channel,
    encode,
)
from inference_worker.contract.request import TokenCounts
from inference_worker.contract.settings import deployment_name
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import OVERLOADED, ApiError, unavailable
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_state import ExecutionState
from millrace.gateway.dispatch.placement import Placement
from millrace.gateway.dispatch.queues import FairQueue, QueueFull
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from millrace.gateway.dispatch.streams import StreamReader
from millrace.gateway.dispatch.wakeups import WakeupBuilder

log = structlog.get_logger(__name__)

EXECUTIONS_KEY = "millrace:executions"  # a set of the executions whose end was not received (see orphans.py)
WRITE_BATCH_SIZE = 64
LOCALITY_TENANTS = 8  # tenants whose next prompts are compared by their cached tokens
LOADING_RETRY_SECONDS = 2.0  # retry time while a model is loaded for the first time
UNKNOWN_WAIT = 5.0  # the retry time in seconds until durations were measured
_LAST = End, Failed  # types of the last event
_PACE = 0.1  # the weight of one execution in the moving average of durations


def decision_record_key(request_id: str) -> str:
    """Return the Valkey key of a request's decision record, a JSON text stored as long as the request's stream."""
    return f"millrace:decisions:{request_id}"


class Dispatcher:
    """The executions that this gateway has dispatched and not finished."""

    def __init__(
        self,
        broker: redis.Redis,
        blocking_broker: redis.Redis,
        gateway_id: str,
        *,
        queue_seconds: float,
        retention_seconds: int,
        max_queued: int = 256,
        locality_tokens: int = 0,
    ) -> None:
        """Create a dispatcher.

        Args:
            blocking_broker: a Valkey client that may block for seconds.
            locality_tokens: by which a tenant's clock may be ahead of others if its next prompt is cached.
        """
        self.broker = broker
        self.gateway_id = gateway_id
        self.queue_seconds = queue_seconds
        self._retention_seconds = retention_seconds
        self._max_queued = max_queued
        self._locality_tokens = locality_tokens
        self.executions: dict[str, Execution] = {}
        # (deployment key, whether of the batch class) -> queue.
        self.queues: dict[tuple[str, bool], FairQueue[Execution]] = {}
        # Deployment key -> mean duration of an execution, from being sent to its end.
        self._seconds: dict[str, float] = {}
        self._outbox: list[Execution] = []
        self._to_send = asyncio.Event()
        self._pending_events: list[bytes] = []  # usage events that could not be written to Valkey yet
        self._ended: list[str] = []  # to be removed from EXECUTIONS_KEY
        self.commands = CommandConnection(broker)
        self._wakeups = WakeupBuilder()
        self.reader = StreamReader(blocking_broker, gateway_id, self._accept, self._on_gap)
        self.abandon_script = broker.register_script(claims.ABANDON)
        self._fail_script = broker.register_script(claims.FAIL)
        self._cancel_script = broker.register_script(claims.CANCEL)
        self._withdraw_script = broker.register_script(claims.WITHDRAW)
        self._tasks: list[asyncio.Task[None]] = []
        self.demands: set[str] = set()  # unloaded deployments that requests need
        self.replicas = ReplicaRegistry()
        self.placement = Placement(self.replicas)

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self.reader.run()), asyncio.create_task(self._send_outbox())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)
        self.commands.close()
        self.reader.close()

    @property
    def in_flight(self) -> int:
        return len(self.executions)

    # Executions enter a queue, fair between tenants, and leave it when a replica has capacity.

    def require_capacity(self, key: str, tenant: int, weight: float = 1.0, *, batch: bool = False) -> None:
        """Check early that the deployment has a replica and that the wait would not be too long.

        A request for an unloaded deployment starts its load. It may wait for the load.

        Raises:
            ApiError: 503 with a retry time.
        """
        if not self.replicas.serving(key):
            wait = self.replicas.load_seconds(key)
            if wait is not None:
                self.demands.add(key)
            if wait is None or wait > self.queue_seconds:
                raise self.not_loaded(key)
            return
        queue = self._queue(key, batch=False)
        if batch or not len(queue):  # batches may wait for any time
            return
        wait = self._wait(key, tenant, weight)
        if queue.is_full(tenant) or (wait or 0) > self.queue_seconds:
            raise self.build_overload_error(key, wait)

    def build_overload_error(self, key: str, wait: float | None) -> ApiError:
        """Return the error of a request that no replica has capacity for."""
        if not self.replicas.serving(key):
            return self.not_loaded(key)
        seconds = max(1.0, UNKNOWN_WAIT if wait is None else min(wait, 60.0))
        return ApiError(OVERLOADED, f"The model {deployment_name(key)!r} is busy. Retry later.", retry_after=seconds)

    def not_loaded(self, key: str) -> ApiError:
        """Return the error of a request that no replica is ready for. Its retry time is the measured time of a load."""
        seconds = max(LOADING_RETRY_SECONDS, self.replicas.load_seconds(key) or 0.0)
        message = f"The model {deployment_name(key)!r} is not ready yet. Retry later."
        return ApiError("model_loading", message, retry_after=seconds)

    def relative_load(self, key: str) -> float | None:
        """Return the deployment's requests per slot of its ready replicas; None if no replica is ready."""
        ready = self.replicas.find_ready(key)
        slots = sum(heartbeat.max_num_seqs for heartbeat in ready.values())
        if not slots:
            return None
        queue = self.queues.get((key, False))
        return (sum(map(self.placement.load, ready)) + (0 if queue is None else len(queue))) / slots

    def submit(self, execution: Execution) -> None:
        """Put an execution into its queue. Its buffer receives the events.

        Raises:
            ApiError: 503, the tenant's queue is full.
        """
        key, tenant, weight = execution.deployment_key, execution.tenant, execution.job.weight
        try:
            self._queue(key, execution.batch).put(tenant, weight, execution.cost, execution, long=execution.is_long)
        except QueueFull:
            raise self.build_overload_error(key, self._wait(key, tenant, weight)) from None
        execution.advance(ExecutionState.QUEUED)
        self.executions[execution.request_id] = execution
        self.dispatch_ready(key)

    def is_supervised(self, request_id: str, number: int) -> bool:
        """Return whether this gateway has the execution and will handle its end."""
        execution = self.executions.get(request_id)
        return execution is not None and execution.execution == number

    def release(self, execution: Execution) -> None:
        """Forget an execution whose events are no longer needed."""
        if self.executions.get(execution.request_id) is execution:
            del self.executions[execution.request_id]
        self.finish(execution)
        execution.advance(ExecutionState.CLOSED)

    def dispatch_ready(self, key: str) -> None:
        """Send queued executions to replicas with capacity. Batch requests are sent if no other request waits."""
        for batch in (False, True):
            self._dispatch_queue(self._queue(key, batch))
            if len(self._queue(key, batch)):
                return

    def _dispatch_queue(self, queue: FairQueue[Execution]) -> None:
        while waiting := queue.candidates(self._locality_tokens, LOCALITY_TENANTS):
            place = self.placement.most_cached(waiting)
            execution = waiting[place]
            choice = self.placement.choose(execution.job)
            if choice is None:
                return
            queue.pop(place)
            waited = time.monotonic() - execution.waiting_since
            execution.advance(ExecutionState.SENT)
            execution.target = choice.replica_id
            execution.sent_at = execution.notified_at = time.monotonic()
            execution.prefix_hash, execution.predicted_cached = choice.prefix_hash, choice.predicted
            if choice.replicas_with_prefix and not execution.written:
                execution.job = msgspec.structs.replace(execution.job, replicas_with_prefix=choice.replicas_with_prefix)
            self.placement.note_sent(choice.replica_id, batch=execution.batch)
            execution.decision_record.place(
                {
                    "execution": execution.execution,
                    "attempt": execution.attempt,
                    "model": execution.model,
                    "replica": choice.replica_id,
                    "by": choice.by,
                    "load": choice.load,
                    "credits": choice.credits,
                    "queued_ms": round(waited * 1000),
                    **({} if choice.predicted is None else {"predicted_cached_tokens": choice.predicted}),
                }
            )
            self._outbox.append(execution)
            self._to_send.set()

    def requeue(self, execution: Execution) -> None:
        """Put an execution back at the head of its queue, for another replica."""
        self._leave_replica(execution)
        if execution.advance(ExecutionState.QUEUED):
            execution.waiting_since = time.monotonic()
            queue = self._queue(execution.deployment_key, execution.batch)
            queue.requeue(execution.tenant, execution.job.weight, execution)
            self.dispatch_ready(execution.deployment_key)

    def restart(self, execution: Execution, attempt: int) -> None:
        """Start another attempt, whose events replace those of the earlier one."""
        execution.buffer.restart(attempt)
        self.requeue(execution)

    def renotify(self, execution: Execution) -> None:
        """Send the wakeup again, since it may be lost."""
        if not execution.advance(ExecutionState.RESENT):
            return
        execution.notified_at = time.monotonic()
        self._outbox.append(execution)
        self._to_send.set()

    def set_owner(self, execution: Execution, replica_id: str) -> None:
        """Record the replica that has claimed the execution, unless the execution has finished."""
        if execution.owner == replica_id or execution.is_finished:
            return
        if execution.target != replica_id:  # an earlier wakeup was used after all
            self._leave_replica(execution)
            self._leave_queue(execution)
            execution.target = replica_id
            self.placement.note_sent(replica_id, batch=execution.batch)
        execution.advance(ExecutionState.CLAIMED)  # unless its events have arrived already
        execution.owner = replica_id
        self.placement.note_claimed(replica_id, batch=execution.batch)

    def finish(
        self, execution: Execution, used: int | None = None, state: ExecutionState = ExecutionState.FINISHED
    ) -> None:
        """Finish an execution and free its replica's capacity, at the first call.

        Args:
            used: the number of its tokens, if known.
            state: a more specific state of its end.
        """
        was_finished = execution.is_finished
        if not was_finished:
            self._leave_queue(execution)
        execution.advance(state)
        if was_finished:
            return
        if used is not None:
            queue = self._queue(execution.deployment_key, execution.batch)
            queue.refund(execution.tenant, max(0, execution.cost - used))
        if used is not None and not execution.batch:
            seconds = time.monotonic() - execution.sent_at
            mean_seconds = self._seconds.setdefault(execution.deployment_key, seconds)
            self._seconds[execution.deployment_key] = mean_seconds + _PACE * (seconds - mean_seconds)
        self._leave_replica(execution)
        self.dispatch_ready(execution.deployment_key)

    def fail_locally(
        self, execution: Execution, error: ApiError, state: ExecutionState = ExecutionState.FINISHED
    ) -> None:
        """End the execution with a failure that is not in its log. `state` is a more specific state of its end."""
        execution.retry_after = error.retry_after
        execution.buffer.fail(error.code, error.message, unsent=not execution.written)
        self.finish(execution, state=state)

    async def cancel(self, execution: Execution) -> bool:
        """Cancel the execution in any state.

        A worker stops within two engine steps and settles the tokens that it generated. Returns True if the
        execution's end is still to come.
        """
        if execution.is_finished:
            return False
        if execution.is_queued:
            self.finish(execution)
            if not execution.written:
                await self.record_not_started(execution.job.billing_context)
                return False
        return await self.cancel_claim(execution.job.billing_context)

    async def cancel_claim(self, billing_context: BillingContext) -> bool:
        """Cancel an execution that may have been dispatched by another gateway."""
        request_id, execution = billing_context.request_id, billing_context.execution
        keys = [claim_key(request_id, execution), USAGE_STREAM]
        running = await self._cancel_script(keys=keys, args=[self._not_started_event(billing_context)])
        if running is None:
            return False
        owner, attempt = running
        await self.broker.publish(control_channel(owner.decode()), encode((request_id, execution, int(attempt))))
        return True

    async def withdraw_claim(self, billing_context: BillingContext) -> bool:
        """Cancel an execution if no replica has claimed it. Return whether it was queued."""
        keys = [claim_key(billing_context.request_id, billing_context.execution), USAGE_STREAM]
        return bool(await self._withdraw_script(keys=keys, args=[self._not_started_event(billing_context)]))

    async def send_stop(self, execution: Execution) -> None:
        """Ask the replica that runs the execution to stop, whatever its claim says."""
        if execution.owner is not None:
            stop = encode((execution.request_id, execution.execution, execution.attempt))
            await self.broker.publish(control_channel(execution.owner), stop)

    async def fail(self, job: InferenceJob, attempt: int, code: str, *, force: bool = False) -> bool:
        """Mark the execution as failed and unpin its blocks, before the failure is reported to the client.

        Returns False if it already ended otherwise; its log says how. With `force`, unpin even then.
        """
        keys = [claim_key(job.billing_context.request_id, job.billing_context.execution), USAGE_STREAM]
        args: list[str | int | bytes] = [attempt, self._encode_failure(job, attempt, code)]
        return bool(await self._fail_script(keys=keys, args=args + ["unpin"] * force) == 1)

    async def force_fail(self, job: InferenceJob, attempt: int, code: str) -> None:
        """Mark the execution as failed even if it has ended; settled usage is reversed.

        If Valkey is unavailable, the event is sent later, as in `record_not_started`.
        """
        try:
            if await self.fail(job, attempt, code, force=True):
                return
        except (redis.RedisError, OSError) as exc:
            log.warning("failure_record_failed", **job.billing_context.log_fields(), error=str(exc))
        self._pending_events.append(self._encode_failure(job, attempt, code))
        await self.flush_pending_events()

    async def record_not_started(self, *executions: BillingContext) -> None:
        """Report executions that no replica will run, so that the settler releases their reservations.

        If a worker has received one nevertheless, it is not billed. While Valkey is unavailable the events are kept
        here. If the gateway fails before they are sent, the reservations are reclaimed.
        """
        self._pending_events += [self._not_started_event(execution) for execution in executions]
        try:
            await self.flush_pending_events()
        except (redis.RedisError, OSError) as exc:
            log.warning("reservation_release_failed", executions=len(self._pending_events), error=str(exc))

    async def flush_pending_events(self) -> None:
        """Send the pending usage events. Duplicates are settled once."""
        if not self._pending_events:
            return
        events, self._pending_events = self._pending_events, []
        try:
            async with self.broker.pipeline(transaction=False) as pipe:
                for event in events:
                    pipe.xadd(USAGE_STREAM, {"e": event})
                await pipe.execute()
        except BaseException:
            self._pending_events = events + self._pending_events
            raise

    async def forget_ended(self) -> None:
        """Remove the executions whose end was received from EXECUTIONS_KEY. If this fails, a sweep of orphans does."""
        ended, self._ended = self._ended, []
        if ended:
            await self.broker.srem(EXECUTIONS_KEY, *ended)

    def _member(self, execution: Execution) -> str:
        return f"{self.gateway_id} {execution.request_id} {execution.execution}"

    async def record_hit(self, execution: Execution, usage: ExecutionUsage) -> None:
        """Record the usage and the decisions of an execution that was served from the answer cache.

        Raises:
            redis.RedisError: Valkey is unavailable. The usage may have been recorded.
        """
        decisions = msgspec.json.encode(execution.decision_record)
        async with self.broker.pipeline(transaction=True) as pipe:
            pipe.xadd(USAGE_STREAM, {"e": usage.encoded})
            pipe.set(decision_record_key(execution.request_id), decisions, ex=self._retention_seconds)
            await pipe.execute()

    async def record_decisions(self, execution: Execution) -> None:
        """Store the decision record again, since it has changed after the dispatch of the last execution."""
        decisions = msgspec.json.encode(execution.decision_record)
        try:
            await self.broker.set(decision_record_key(execution.request_id), decisions, ex=self._retention_seconds)
        except (redis.RedisError, OSError) as exc:
            log.warning("decisions_not_recorded", request_id=execution.request_id, error=str(exc))

    def _encode_failure(self, job: InferenceJob, attempt: int, code: str) -> bytes:
        return encode(
            ExecutionUsage(job.billing_context, attempt, "failed", code, TokenCounts(), f"gateway.{self.gateway_id}", 0)
        )

    def _not_started_event(self, execution: BillingContext) -> bytes:
        return encode(
            ExecutionUsage(execution, 0, "cancelled", "never_ran", TokenCounts(), f"gateway.{self.gateway_id}", 0)
        )

    def waiting_keys(self) -> set[str]:
        """Return the keys of the deployments with queued executions."""
        return {key for (key, _), queue in self.queues.items() if len(queue)}

    def forget_unused_queues(self, keys: Collection[str]) -> None:
        """Remove the empty queues of all deployments but these, such as those of replaced versions."""
        unused = [name for name, queue in self.queues.items() if name[0] not in keys and not len(queue)]
        for name in unused:
            del self.queues[name]
            self._seconds.pop(name[0], None)

    def _queue(self, key: str, batch: bool) -> FairQueue[Execution]:
        queue = self.queues.get((key, batch))
        if queue is None:
            queue = self.queues[key, batch] = FairQueue(self._max_queued)
        return queue

    def _wait(self, key: str, tenant: int, weight: float) -> float | None:
        """Estimate the seconds until a request of the tenant would be sent. None: no duration was measured yet."""
        seconds = self._seconds.get(key)
        at_work = sum(self.placement.local_load(replica_id) for replica_id in self.replicas.find_ready(key))
        if seconds is None or not at_work:
            return None
        queue = self._queue(key, batch=False)
        return (queue.count_waiting(tenant) + 1) * seconds / at_work / queue.share(tenant, weight)

    def _leave_queue(self, execution: Execution) -> None:
        if execution.is_queued:
            self._queue(execution.deployment_key, execution.batch).remove(execution.tenant, execution)

    def _leave_replica(self, execution: Execution) -> None:
        if execution.target is not None:
            self.placement.note_ended(execution.target, claimed=execution.owner is not None, batch=execution.batch)
        execution.target = execution.owner = None

    async def _send_outbox(self) -> None:
        while True:
            await self._to_send.wait()
            batch, self._outbox = self._outbox[:WRITE_BATCH_SIZE], self._outbox[WRITE_BATCH_SIZE:]
            if not self._outbox:
                self._to_send.clear()
            not_sent = [
                execution.job.billing_context for execution in batch if execution.is_finished and not execution.written
            ]
            if not_sent:
                await self.record_not_started(*not_sent)
            await self._send([execution for execution in batch if not execution.is_finished])

    async def _send(self, batch: list[Execution]) -> None:
        """Write a batch. An execution that cannot be written fails, and the others are still sent."""
        try:
            await self._write(batch)
        except (redis.RedisError, OSError) as exc:
            log.warning("broker_unreachable", error=str(exc))
            await self._fail_unsent(batch, unavailable())
            return
        except Exception:
            if len(batch) > 1:
                for execution in batch:
                    await self._send([execution])
                return
            log.exception("execution_not_sent", request_ids=[execution.request_id for execution in batch])
            message = "The server had an internal error. Send the request again."
            await self._fail_unsent(batch, ApiError("internal_error", message))
            return
        for execution in batch:
            execution.written = True
            # Cancelled while its claim was being written, unless its end has already been received.
            if execution.is_finished and execution.owner is None and execution.state is not ExecutionState.ENDED:
                await self._cancel_quietly(execution)

    async def _fail_unsent(self, batch: list[Execution], error: ApiError) -> None:
        for execution in batch:
            self.fail_locally(execution, error)
        await self.record_not_started(*(execution.job.billing_context for execution in batch))

    async def _write(self, batch: list[Execution]) -> None:
        """Write the executions' claim records, then send their wakeups."""
        by_replica: defaultdict[str, list[Wakeup]] = defaultdict(list)
        commands: list[Command] = []
        if members := [self._member(execution) for execution in batch if not execution.written]:
            commands.append(("SADD", EXECUTIONS_KEY, *members))
        for execution in batch:
            if execution.target is not None:
                wakeup = (execution.request_id, execution.execution, execution.attempt)
                by_replica[execution.target].append(wakeup)
            job = execution.job
            key = claim_key(execution.request_id, execution.execution)
            seconds = max(1, round(job.deadline - time.time())) + self._retention_seconds
            if not execution.written:
                record: dict[str, str | bytes | int] = {
                    "attempt": execution.attempt,
                    "state": "queued",
                    "gateway": self.gateway_id,
                    "tenant": execution.tenant,
                    "project": job.billing_context.project_id,
                    "job": encode(job),
                    "response_spec": execution.encoded_response_spec,
                }
                commands.append(("HSET", key, *chain.from_iterable(record.items())))
                commands.append(("EXPIRE", key, seconds))
            if execution.execution:
                commands.append(("HSET", claim_key(execution.request_id, 0), "execution", execution.execution))
            decisions = msgspec.json.encode(execution.decision_record)
            commands.append(("SET", decision_record_key(execution.request_id), decisions, "EX", seconds))
        for replica_id, wakeups in by_replica.items():
            commands.append(self._wakeups.make(replica_id, wakeups))
        if commands:
            await self.commands.execute(commands)

    async def _cancel_quietly(self, execution: Execution) -> None:
        try:
            await self.cancel_claim(execution.job.billing_context)
        except redis.RedisError as exc:
            log.warning("cancellation_failed", request_id=execution.request_id, error=str(exc))

    # Events from replicas.

    def _accept(self, event: StreamEvent) -> None:
        execution = self.executions.get(event.request_id)
        if execution is None:
            return
        if isinstance(event, Released):
            if not execution.has_begun and event.attempt == execution.attempt + 1:
                self.restart(execution, event.attempt)
        elif event.attempt != execution.attempt:
            return  # an event of an attempt that was abandoned
        elif isinstance(event, Claimed):
            self.set_owner(execution, event.replica_id)
        else:
            if execution.state is not ExecutionState.STREAMING:
                self._begin_stream(execution, event)
            execution.buffer.put(event)
            if isinstance(event, _LAST):
                self._end_stream(execution, event)

    def _begin_stream(self, execution: Execution, event: AnswerEvent | Failed) -> None:
        """Note the first event of an attempt."""
        if execution.prefix_hash and execution.target and not (execution.has_begun or isinstance(event, Failed)):
            self.placement.note_computed(execution.prefix_hash, execution.target)
        self._leave_queue(execution)  # a replica has used an earlier wakeup
        execution.advance(ExecutionState.STREAMING)

    def _end_stream(self, execution: Execution, event: End | Failed) -> None:
        """Note the last event of an execution."""
        if isinstance(event, End):
            self._record_hit_rate(execution, event.usage)
            self.finish(execution, event.usage.total, ExecutionState.ENDED)
        else:
            self.finish(execution, state=ExecutionState.ENDED)
        self._ended.append(self._member(execution))

    def _record_hit_rate(self, execution: Execution, usage: TokenCounts) -> None:
        if execution.predicted_cached is None or execution.target is None:
            return
        prompt = execution.job.num_prompt_tokens
        real = min(usage.cache_read, prompt)
        self.placement.hit_rates.record(execution.target, execution.model, prompt, execution.predicted_cached, real)

    def _on_gap(self) -> None:
        self.replicas.extend_liveness()
        for execution in self.executions.values():
            if not execution.is_queued:
                execution.buffer.refill()
