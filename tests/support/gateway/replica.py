"""A replica for tests of the gateway. It reads jobs and writes the test's events."""

from __future__ import annotations

import asyncio
import time

import redis.asyncio as redis

from inference_worker.contract import claims
from inference_worker.contract.exits import REPORT_EXIT, report_exit_args
from inference_worker.contract.messages import (
    REPLICAS_KEY,
    Claimed,
    End,
    Failed,
    Finished,
    Heartbeat,
    StreamEvent,
    Tokens,
    claim_key,
    encode,
    event_log_key,
    gateway_stream,
)

GATEWAY = "gw-a"
BEAT_SECONDS = 0.05  # a gateway uses a replica once its heartbeat has changed


def heartbeat(beat: int, running: int = 0, waiting: int = 0, model: str = "m", version: str = "") -> bytes:
    return encode(Heartbeat(beat, model, True, False, running, waiting, 8, 10, 0, version=version))


class Replica:
    """A worker from the dispatcher's view: it sends heartbeats, claims jobs and writes events."""

    def __init__(
        self,
        broker: redis.Redis,
        name: str,
        *,
        running: int = 0,
        waiting: int = 0,
        model: str = "m",
        version: str = "",
    ) -> None:
        self.broker = broker
        self.model, self.version = model, version
        self.running, self.waiting = running, waiting
        self.name = name
        self._is_stalled = False
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        beat = time.time_ns()
        while not self._is_stalled:
            beat += 1
            sent = heartbeat(beat, self.running, self.waiting, self.model, self.version)
            await self.broker.hset(REPLICAS_KEY, self.name, sent)  # type: ignore[misc]
            await asyncio.sleep(BEAT_SECONDS)

    def stall(self) -> None:
        """Send no more heartbeats."""
        self._is_stalled = True  # redis-py swallows a cancellation that arrives while it connects
        self._task.cancel()

    def resume(self) -> None:
        self._is_stalled = False
        self._task = asyncio.create_task(self._beat())

    def kill(self) -> None:
        """Exit, and let a supervisor report it."""
        self.stall()
        self._exit = asyncio.create_task(self._report_exit())

    async def _report_exit(self) -> None:
        await self.broker.eval(REPORT_EXIT, *report_exit_args(self.name))  # type: ignore[misc]

    async def claim(self, request_id: str, attempt: int = 1, execution: int = 0) -> bool:
        job = await self.broker.eval(claims.CLAIM, 1, claim_key(request_id, execution), attempt, self.name)  # type: ignore[misc]
        if job is not None:
            await self.send(Claimed(request_id, attempt, self.name))
        return job is not None

    async def send(self, *events: StreamEvent) -> None:
        for event in events:
            if isinstance(event, Tokens | Finished | End | Failed):
                await self.broker.rpush(event_log_key(event.request_id, event.attempt), encode(event))  # type: ignore[misc]
        await self.broker.xadd(gateway_stream(GATEWAY), {"e": encode(list(events))})
