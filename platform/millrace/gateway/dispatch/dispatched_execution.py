"""An execution of a request, as the gateway that dispatched it sees it."""

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
    """The input of `Dispatcher.submit`."""

    job: InferenceJob
    response_spec: bytes  # what another gateway needs to write the same stream
    weight: float = 1.0  # the tenant's weight in the fair queue
    long: bool = False  # waits in the tenant's lane for long prompts
    first_attempt: int = 1  # executions of a request use different attempt numbers, so their logs are separate
    decision_record: dict[str, Any] = field(default_factory=dict)  # the dispatcher adds its placements

    @property
    def cost(self) -> int:
        """Return the maximum number of tokens, prompt and completions together."""
        return len(self.job.prompt_token_ids) + self.job.params.max_tokens * self.job.params.n


class DispatchedExecution:
    """An execution that is queued here, then sent to a replica, then claimed by the replica, then finished."""

    def __init__(self, dispatch_request: DispatchRequest, broker: redis.Redis) -> None:
        self.dispatch_request = dispatch_request
        self.job = dispatch_request.job
        self.request_id = self.job.billing_context.request_id
        self.execution = self.job.billing_context.execution
        self.model = self.job.billing_context.model
        self.tenant = self.job.billing_context.tenant_id
        self.batch = self.job.service_class == ServiceClass.BATCH
        self.buffer = EventBuffer(broker, self.request_id, dispatch_request.first_attempt)
        self.queued = True  # waits for a replica with capacity
        self.written = False  # its claim record is in Valkey
        self.target: str | None = None  # the replica that the wakeup was sent to
        self.owner: str | None = None  # the replica that claimed it
        self.prefix_hash = b""  # identifies the start of its prompt (see placement)
        self.begun = False  # an event of the current attempt was accepted, so no other attempt may start
        self.is_finished = False  # no replica sends further events
        self.end_received = False  # a replica has sent its last event
        self.overdue = False  # it was failed after its deadline
        self.ended = False  # its last event was read by the request
        self.retry_after: float | None = None  # seconds, reported with its failure
        self.lost_replicas = 0  # the number of replicas that were lost while they ran it
        self.moves = 0  # how often it was moved away from a suspected replica
        self.waiting_since = time.monotonic()  # start of the wait for a replica, in this attempt
        self.sent_at = self.waiting_since
        self.notified_at = self.waiting_since

    @property
    def attempt(self) -> int:
        return self.buffer.attempt

    @property
    def unclaimed(self) -> bool:
        """Return whether it was sent and no replica has claimed it."""
        return not (self.queued or self.is_finished or self.begun) and self.owner is None

    async def next_event(self) -> LogEvent:
        return await self.buffer.get()
