"""One execution of a request, as the gateway that is waiting for it knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio as redis

from inference_worker.contract.messages import InferenceJob
from inference_worker.contract.request import ServiceClass
from millrace.gateway.dispatch.streams import EventBuffer, LogEvent


@dataclass(frozen=True)
class DispatchRequest:
    """What the dispatcher is asked to do."""

    job: InferenceJob
    form: bytes  # what another gateway needs to write the same stream
    weight: float = 1.0  # the tenant's share
    long: bool = False  # waits in the tenant's queue for long jobs
    first_attempt: int = 1  # executions of one request number their attempts on, so that their logs stay apart
    why: dict[str, Any] = field(default_factory=dict)  # the record of decisions, to which the dispatcher adds its own

    @property
    def cost(self) -> int:
        """Tokens, at most."""
        return len(self.job.prompt_token_ids) + self.job.params.max_tokens * self.job.params.n


class DispatchedExecution:
    """An execution on its way: queued here, then sent to a replica, then claimed by it, then ended."""

    def __init__(self, dispatch_request: DispatchRequest, broker: redis.Redis) -> None:
        self.dispatch_request = dispatch_request
        self.job = dispatch_request.job
        self.request_id = self.job.billing_context.request_id
        self.execution = self.job.billing_context.execution
        self.model = self.job.billing_context.model
        self.tenant = self.job.billing_context.tenant_id
        self.batch = self.job.service_class == ServiceClass.BATCH
        self.buffer = EventBuffer(broker, self.request_id, dispatch_request.first_attempt)
        self.queued = True  # waits here for a replica's credit
        self.written = False  # its claim record is in the broker
        self.target: str | None = None  # the replica whose wakeup was rung
        self.owner: str | None = None  # the replica that claimed it
        self.start = b""  # names how its prompt starts (see placement)
        self.begun = False  # an event of the current attempt was accepted: no other attempt may answer now
        self.over = False  # nothing is to come from a replica any more
        self.overdue = False  # it was given up after its deadline
        self.ended = False  # its last event was taken by its reader
        self.retry_after: float | None = None  # seconds, told with its failure
        self.lost = 0  # replicas that died with it
        self.moved = 0  # how often it left a suspected replica
        self.waiting_since = time.monotonic()  # for a replica, at this attempt
        self.sent_at = self.waiting_since
        self.rung_at = self.waiting_since

    @property
    def attempt(self) -> int:
        return self.buffer.attempt

    @property
    def unclaimed(self) -> bool:
        """Sent, and nobody works on it yet."""
        return not (self.queued or self.over or self.begun) and self.owner is None

    async def next_event(self) -> LogEvent:
        return await self.buffer.get()
