"""The end of orphans: executions that were sent to a replica, and that no gateway supervises any more.

The set `millrace:executions` names every execution whose end its gateway has not received. A gateway adds an execution
before it writes the claim. An execution is an orphan if its gateway was lost, or has released it before its end, as
after a disconnect of the client. The replica ends an orphan like any other execution. If the replica is lost too, no
process would report the end. Therefore each gateway reads the claims of orphans and fails those that cannot end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import redis.asyncio as redis
import structlog

from inference_worker.contract.messages import claim_key, control_channel, decode_job, encode
from millrace.apps.deployments.gateway_heartbeat import gateway_heartbeat_key
from millrace.gateway.dispatch.dispatcher import EXECUTIONS_KEY, Dispatcher

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 5.0
GATEWAY_LOST_SECONDS = 10.0  # after this time without a heartbeat, other gateways handle a gateway's executions
OVERDUE_SECONDS = 5.0  # how long after its deadline an execution without an end is failed
_READ_BATCH = 500
_RUNNING, _QUEUED = b"running", b"queued"


class _Orphan(NamedTuple):
    member: bytes
    request_id: str
    execution: int


class OrphanSweep:
    """The handling of orphans by one gateway. Several gateways may handle the same orphan: each change is a
    compare-and-set of its claim."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._broker = dispatcher.broker
        self._silent_since: dict[str, float] = {}  # gateway without a heartbeat -> time of the first query

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
                self._silent_since.clear()  # no gateway can send heartbeats

    async def sweep(self) -> None:
        """Fail the orphans that no replica will end, and forget those that have ended."""
        orphans = await self._orphans()
        for start in range(0, len(orphans), _READ_BATCH):
            batch = orphans[start : start + _READ_BATCH]
            async with self._broker.pipeline(transaction=False) as pipe:
                for orphan in batch:
                    pipe.hmget(claim_key(orphan.request_id, orphan.execution), "state", "attempt", "owner")
                claims: list[Any] = await pipe.execute()
            ended = [
                orphan.member
                for orphan, claim in zip(batch, claims, strict=True)
                if claim[0] not in (_RUNNING, _QUEUED) or await self._fail(orphan, *claim)
            ]
            if ended:
                await self._broker.srem(EXECUTIONS_KEY, *ended)

    async def _orphans(self) -> list[_Orphan]:
        members: Any = await self._broker.smembers(EXECUTIONS_KEY)
        by_gateway: dict[str, list[_Orphan]] = {}
        for member in members:
            gateway_id, request_id, execution = member.decode().split()
            by_gateway.setdefault(gateway_id, []).append(_Orphan(member, request_id, int(execution)))
        own = by_gateway.pop(self._dispatcher.gateway_id, [])
        lost = await self._lost_gateways(by_gateway)
        orphans = [orphan for orphan in own if not self._dispatcher.is_supervised(orphan.request_id, orphan.execution)]
        return orphans + [orphan for gateway_id in lost for orphan in by_gateway[gateway_id]]

    async def _lost_gateways(self, gateway_ids: Iterable[str]) -> list[str]:
        """Return the gateways that have sent no heartbeat for some time, by this gateway's clock."""
        names = list(gateway_ids)
        async with self._broker.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(gateway_heartbeat_key(name))
            present = await pipe.execute()
        now = time.monotonic()
        self._silent_since = {
            name: self._silent_since.get(name, now)
            for name, is_present in zip(names, present, strict=True)
            if not is_present
        }
        return [name for name, since in self._silent_since.items() if now - since > GATEWAY_LOST_SECONDS]

    async def _fail(self, orphan: _Orphan, state: bytes, attempt: bytes, owner: bytes | None) -> bool:
        """Fail an orphan that no replica will end. Return whether it has failed."""
        replicas, replica_id = self._dispatcher.replicas, "" if owner is None else owner.decode()
        payload: Any = await self._broker.hget(claim_key(orphan.request_id, orphan.execution), "job")
        if payload is None:
            return True
        job = decode_job(payload)
        # No gateway would send the wakeup of a queued orphan again.
        if state == _QUEUED or replicas.is_lost(replica_id):
            code = "worker_lost"
        elif time.time() > job.deadline + OVERDUE_SECONDS:
            code = "timeout"
        else:
            return False
        has_failed = await self._dispatcher.fail(job, int(attempt), code)
        if has_failed:
            log.warning("orphan_failed", **job.billing_context.log_fields(), code=code)
        if replica_id:  # it may only have been unresponsive
            stop = encode((orphan.request_id, orphan.execution, int(attempt)))
            await self._broker.publish(control_channel(replica_id), stop)
        return has_failed
