"""The dispatch monitor: supervises replicas and executions twice a second, less often while the gateway rests.

It reads heartbeats and reported exits, handles lost and suspected replicas, sends wakeups for unclaimed executions
again and fails expired executions. A step that fails half-way continues in the next round.

- Lost replica: an execution without an event gets another attempt, one with events fails.
- Suspected replica: an execution without an event gets another attempt if another replica takes work. One with events
  continues: its tokens arrive when the replica responds again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import redis.asyncio as redis
import structlog

from inference_worker.contract.deployments import DEMAND_SECONDS, demand_key
from inference_worker.contract.messages import (
    CORDONS_KEY,
    EXITS_KEY,
    HEARTBEAT_SECONDS,
    REPLICAS_KEY,
    claim_key,
    control_channel,
    encode,
    replica_keys,
)
from inference_worker.contract.prefix_digest import NO_DIGEST, digest_key
from inference_worker.contract.settings import deployment_name
from millrace.apps.deployments.gateway_heartbeat import GatewayHeartbeat, QueueDepth, send_gateway_heartbeat
from millrace.environment.host_reports import HostReport
from millrace.gateway.core.activity import Activity, Poll
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_state import ExecutionState
from millrace.gateway.dispatch.orphans import OVERDUE_SECONDS, OrphanSweep

log = structlog.get_logger(__name__)

KNOWN_AFTER_ROUNDS = 3  # exchanges in which each running replica has sent two heartbeats, so that it is seen alive
DIGEST_ROUNDS = 2  # between readings of the digests of prefix caches
DIGESTS_PER_READ = 32  # decoded in less than a millisecond; other tasks run between reads
FIRST_RENOTIFY_SECONDS = 1.5  # a lost task is sent again after TASK_LOST_MS
RENOTIFY_SECONDS = 5.0
MAX_LOST_REPLICAS = 3  # with this many lost replicas, the request probably causes the losses
MAX_MOVES = 2  # after this many moves, the request probably makes replicas unresponsive, and it stays
WORKER_LOST = "The worker that ran this request was lost. Send the request again."
NOT_SERVED = f"{MAX_LOST_REPLICAS} workers were lost while they ran this request. It is not retried."


class DispatchMonitor:
    """The supervisor of one dispatcher's executions."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        activity: Activity | None = None,
        read_failures: Callable[[], Mapping[str, str]] = dict,
        read_host: Callable[[], HostReport | None] = lambda: None,
    ) -> None:
        """Create a monitor.

        Args:
            read_failures: returns the deployments whose model bundle this gateway cannot load, each with the reason.
            read_host: returns the state of this machine.
        """
        self._dispatcher = dispatcher
        self._read_failures = read_failures
        self._read_host = read_host
        self._pauses = Poll(activity)
        self._broker = dispatcher.broker
        self._replicas = dispatcher.replicas
        self._exchanges = 0  # number of heartbeats since the start
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(OrphanSweep(self._dispatcher).run())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    @property
    def knows_replicas(self) -> bool:
        """Return whether heartbeats were read for long enough to know all running replicas."""
        return self._exchanges >= KNOWN_AFTER_ROUNDS

    async def _run(self) -> None:
        rounds = 0
        while True:
            try:
                lost = await self._exchange_heartbeats()
                await self._dispatcher.flush_pending_events()
                await self._dispatcher.forget_ended()
                self._dispatcher.placement.observe()
                if rounds % DIGEST_ROUNDS == 0:
                    await self._read_digests()
                for key in {key for key, _ in self._dispatcher.queues}:
                    self._dispatcher.dispatch_ready(key)
                await self._demand_loads()
                await self._handle_lost_replicas(lost)
                await self._end_overdue()
                await self._renotify()
                rounds += 1
                if rounds % 20 == 0:
                    await self._run_maintenance()
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                self._replicas.extend_liveness()
            await self._pauses.pause(HEARTBEAT_SECONDS)

    async def _exchange_heartbeats(self) -> set[str]:
        """Read the replicas' heartbeats, exits and cordons, and send this gateway's. Return the replicas lost since."""
        async with self._broker.pipeline(transaction=False) as pipe:
            pipe.hgetall(REPLICAS_KEY)
            pipe.hkeys(CORDONS_KEY)
            pipe.zrange(EXITS_KEY, 0, -1)
            send_gateway_heartbeat(pipe, self._dispatcher.gateway_id, self._heartbeat())
            heartbeats, cordoned, exited, *_ = await pipe.execute()
        self._exchanges += 1
        return self._replicas.update(heartbeats, cordoned, exited)

    async def _read_digests(self) -> None:
        """Read the digests of the prefix caches that have changed since they were read."""
        prefixes = self._dispatcher.placement.prefixes
        versions = {replica_id: heartbeat.digest for replica_id, heartbeat in self._replicas.live().items()}
        prefixes.retain([replica_id for replica_id, version in versions.items() if version != NO_DIGEST])
        changed = prefixes.find_changed(versions)
        for start in range(0, len(changed), DIGESTS_PER_READ):
            replica_ids = changed[start : start + DIGESTS_PER_READ]
            payloads: Any = await self._broker.mget([digest_key(replica_id) for replica_id in replica_ids])
            prefixes.update(dict(zip(replica_ids, payloads, strict=True)))

    def _heartbeat(self) -> GatewayHeartbeat:
        now = time.monotonic()
        waiting: dict[tuple[str, bool], list[float]] = {}
        for execution in self._executions():
            if execution.is_queued:
                waiting.setdefault((execution.model, execution.batch), []).append(now - execution.waiting_since)
        depths = (
            QueueDepth(*queue_key, len(waits), round(max(waits) * 1000)) for queue_key, waits in sorted(waiting.items())
        )
        hit_rates = self._dispatcher.placement.hit_rates.recent(self._replicas.live())
        in_flight, failures = self._dispatcher.in_flight, dict(self._read_failures())
        return GatewayHeartbeat(in_flight, tuple(depths), hit_rates, failures, self._read_host())

    async def _demand_loads(self) -> None:
        """Request the load of unloaded deployments that requests wait for. Workers read it twice a second."""
        waiting = {key for key in self._dispatcher.waiting_keys() if self._replicas.load_seconds(key) is not None}
        demands, self._dispatcher.demands = self._dispatcher.demands | waiting, set()
        for key in demands:
            await self._broker.set(demand_key(deployment_name(key)), "", ex=DEMAND_SECONDS)

    async def _run_maintenance(self) -> None:
        await self._dispatcher.reader.create()
        self._dispatcher.forget_unused_queues(self._replicas.keys())
        for queue in self._dispatcher.queues.values():
            queue.forget_idle()
        if forgotten := self._replicas.take_forgotten():
            keys = [key for replica_id in forgotten for key in replica_keys(replica_id)]
            await self._broker.delete(*keys)
            await self._broker.hdel(REPLICAS_KEY, *forgotten)

    def _executions(self) -> list[Execution]:
        return [each for each in self._dispatcher.executions.values() if not each.is_finished]

    async def _handle_lost_replicas(self, lost: Collection[str]) -> None:
        for replica_id in lost:
            log.warning("replica_lost", replica_id=replica_id)
        for execution in self._executions():
            owner = execution.owner
            # An owner may have left without an observed loss, such as by a clean stop between two rounds.
            if owner is None:
                continue
            if owner in lost or self._replicas.is_lost(owner):
                await self._owner_lost(execution, owner)
            elif not execution.has_begun and self._replicas.is_suspected(owner):
                await self._move(execution, owner)

    async def _move(self, execution: Execution, owner: str) -> None:
        """Move an execution without an event to another replica, if there is one."""
        if execution.moves < MAX_MOVES and self._replicas.serving(execution.deployment_key):
            if await self._restart(execution, owner):
                execution.moves += 1
            else:
                await self._catch_up(execution)

    async def _restart(self, execution: Execution, owner: str) -> bool:
        """Start another attempt. From then on the events of the owner's attempt are neither read nor billed.

        Returns:
            False if the owner no longer has the claim.
        """
        dispatcher = self._dispatcher
        key, attempt_to_stop = claim_key(execution.request_id, execution.execution), execution.attempt
        attempt = await dispatcher.abandon_script(keys=[key], args=[attempt_to_stop, owner])
        if attempt is None:
            return False
        if execution.has_begun:  # its first token arrived during the call
            await dispatcher.fail(execution.job, int(attempt), "worker_lost")
            dispatcher.fail_locally(execution, ApiError("worker_lost", WORKER_LOST))
        else:
            dispatcher.restart(execution, int(attempt))
        await self._stop_owner(execution, owner, attempt_to_stop)
        return True

    async def _stop_owner(self, execution: Execution, owner: str, attempt: int) -> None:
        """Stop the owner's attempt, which no client waits for. The owner may only have been unresponsive."""
        stop = encode((execution.request_id, execution.execution, attempt))
        await self._broker.publish(control_channel(owner), stop)

    async def _owner_lost(self, execution: Execution, owner: str) -> None:
        dispatcher = self._dispatcher
        is_harmful = not execution.has_begun and execution.lost_replicas + 1 >= MAX_LOST_REPLICAS
        if not execution.has_begun and not is_harmful:
            if await self._restart(execution, owner):
                execution.lost_replicas += 1
                return
            if await self._catch_up(execution):
                return
        code, message = ("not_served", NOT_SERVED) if is_harmful else ("worker_lost", WORKER_LOST)
        if await dispatcher.fail(execution.job, execution.attempt, code):
            dispatcher.fail_locally(execution, ApiError(code, message))
            await self._stop_owner(execution, owner, execution.attempt)
        else:
            execution.buffer.refill()
            dispatcher.finish(execution)

    async def _end_overdue(self) -> None:
        now, unix_now = time.monotonic(), time.time()
        dispatcher = self._dispatcher
        for execution in self._executions():
            is_late = now - execution.waiting_since > dispatcher.queue_seconds
            if is_late and (execution.is_queued or execution.is_unclaimed) and await self._withdraw(execution):
                dispatcher.fail_locally(execution, dispatcher.build_overload_error(execution.deployment_key, None))
        for execution in list(dispatcher.executions.values()):
            is_overdue = execution.state is ExecutionState.OVERDUE
            if not is_overdue and unix_now > execution.job.deadline + OVERDUE_SECONDS:
                await dispatcher.fail(execution.job, execution.attempt, "timeout")
                error = ApiError("timeout", "The request exceeded its deadline.")
                dispatcher.fail_locally(execution, error, ExecutionState.OVERDUE)

    async def _withdraw(self, execution: Execution) -> bool:
        """Withdraw an execution that is not claimed. Return False if a replica has claimed it."""
        if not execution.written:
            if execution.is_queued:
                await self._dispatcher.record_not_started(execution.job.billing_context)
            return execution.is_queued
        return await self._dispatcher.withdraw_claim(execution.job.billing_context)

    async def _renotify(self) -> None:
        """Send lost wakeups again: a replica may have failed after it received one and before it claimed the job."""
        now = time.monotonic()
        for execution in self._executions():
            if not execution.is_unclaimed or not execution.written:
                continue
            must_move = execution.target is None or not self._replicas.takes_work(execution.target)
            is_resent = execution.state is ExecutionState.RESENT
            wait = RENOTIFY_SECONDS if is_resent else FIRST_RENOTIFY_SECONDS
            is_due = must_move or now - execution.notified_at > wait
            if not is_due or await self._catch_up(execution) or not execution.is_unclaimed:
                continue
            if must_move:
                self._dispatcher.requeue(execution)
            else:
                self._dispatcher.renotify(execution)

    async def _catch_up(self, execution: Execution) -> bool:
        """Read from the claim what a lost event would have reported: its owner, or a later attempt.

        Returns:
            False if there is nothing new.
        """
        claim: Any = await self._broker.hmget(
            claim_key(execution.request_id, execution.execution), "attempt", "state", "owner"
        )
        attempt, state, owner = claim
        if execution.has_begun or execution.is_finished:  # an event has arrived during the call
            return True
        if attempt is None:  # Valkey has lost it
            execution.written = False
            self._dispatcher.restart(execution, execution.attempt + 1)
            return True
        if int(attempt) > execution.attempt:
            self._dispatcher.restart(execution, int(attempt))
            return True
        if state == b"running" and owner is not None:
            self._dispatcher.set_owner(execution, owner.decode())
            return True
        return False
