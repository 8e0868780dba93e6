"""Reading a request's response from its log, also at a gateway that did not dispatch the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from inference_worker.contract.messages import (
    AnswerEvent,
    End,
    Failed,
    InferenceJob,
    claim_key,
    decode_job,
    gateway_stream,
)
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.multi_prompt import merge_events, part_id
from millrace.gateway.core.types import ResponseSpec, decode_response_spec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.streams import STREAM_LOST, EventsLost, read_log

POLL_SECONDS = 0.05
WORKER_LOST = "The worker that ran this request was lost. Send the request again."


class AnsweringExecution(NamedTuple):
    """The execution that produces the response, as its claim describes it."""

    number: int
    attempt: int
    state: str
    owner: str | None


class StreamNotFound(Exception):
    """Raised if the request was never sent or is no longer stored."""


class StreamFollower:
    """A reader of one request's events.

    Args:
        project_id: the project that the request must be of; None: any project of the tenant.
    """

    def __init__(self, dispatcher: Dispatcher, request_id: str, tenant_id: int, project_id: int | None) -> None:
        self.request_id = request_id
        self._dispatcher = dispatcher
        self._broker = dispatcher.broker
        self._tenant_id, self._project_id = tenant_id, project_id

    async def response_spec(self) -> ResponseSpec:
        """Return the response spec of the current execution.

        Raises:
            StreamNotFound: the tenant, or its project, has no such request.
        """
        number = (await self.execution()).number
        fields = ("tenant", "project", "response_spec")
        claim: Any = await self._broker.hmget(claim_key(self.request_id, number), *fields)
        tenant_id, project_id, response_spec = claim
        if tenant_id is None or response_spec is None or int(tenant_id) != self._tenant_id:
            raise StreamNotFound
        if self._project_id is not None and (project_id is None or int(project_id) != self._project_id):
            raise StreamNotFound
        return decode_response_spec(response_spec)

    async def execution(self) -> AnsweringExecution:
        """Return the current execution of the request.

        Raises:
            StreamNotFound: it is no longer stored.
        """
        claim: Any = await self._claim(0)
        number = int(claim[3] or 0)
        if number:
            claim = await self._claim(number)
        attempt, state, owner, _ = claim
        if attempt is None:
            raise StreamNotFound
        return AnsweringExecution(number, int(attempt), state.decode(), owner.decode() if owner is not None else None)

    async def events(self) -> AsyncIterator[AnswerEvent]:
        """Yield the response's events from the first one on, as they arrive. The last one is the end.

        Until the first event another execution may take over, with another response spec.

        Raises:
            ApiError: the request failed, or its worker was lost.
            StreamNotFound: it is no longer stored.
        """
        parts = [self._events(), *[part._events_when_sent(self) for part in await self._further_parts()]]
        async for event in merge_events(parts, (await self.response_spec()).n):
            yield event

    async def cancel(self) -> None:
        """Cancel the request, since no client reads it."""
        for part in (self, *await self._further_parts()):
            with contextlib.suppress(StreamNotFound):
                job = await part._job((await part.execution()).number)
                if job is not None:
                    await self._dispatcher.cancel_claim(job.billing_context)

    async def _further_parts(self) -> list[StreamFollower]:
        """Return the followers of the request's further prompts."""
        names = [part_id(self.request_id, number) for number in range(1, (await self.response_spec()).prompts)]
        return [StreamFollower(self._dispatcher, name, self._tenant_id, self._project_id) for name in names]

    async def _events_when_sent(self, first: StreamFollower) -> AsyncIterator[AnswerEvent]:
        """Yield the events of a further prompt, which its gateway may not have sent yet."""
        while not await self._broker.exists(claim_key(self.request_id, 0)):
            gateway: Any = await self._broker.hget(claim_key(first.request_id, 0), "gateway")
            if gateway is None or not await self._broker.exists(gateway_stream(gateway.decode())):
                raise ApiError("worker_lost", WORKER_LOST)
            await asyncio.sleep(POLL_SECONDS)
        async for event in self._events():
            yield event

    async def _events(self) -> AsyncIterator[AnswerEvent]:
        attempt, next_seq = 0, 0
        while True:
            try:
                execution = await self.execution()
            except StreamNotFound:
                if next_seq:
                    raise ApiError("stream_lost", STREAM_LOST) from None
                raise
            if execution.attempt != attempt:
                if next_seq:  # the events that were read do not belong to the response any more
                    raise ApiError("worker_lost", WORKER_LOST)
                attempt = execution.attempt
            try:
                events = await read_log(self._broker, self.request_id, attempt, next_seq)
            except EventsLost:
                raise ApiError("stream_lost", STREAM_LOST) from None
            for event in events:
                if isinstance(event, Failed):
                    raise ApiError(event.code, event.message, event.param)
                if isinstance(event, End) and event.finish_reason == "cancelled":
                    raise ApiError("cancelled", "The request was cancelled.")
                next_seq += 1
                yield event
                if isinstance(event, End):
                    return
            if not events:
                await self._check_alive(execution)
                await asyncio.sleep(POLL_SECONDS)

    async def _claim(self, execution: int) -> Any:
        return await self._broker.hmget(claim_key(self.request_id, execution), "attempt", "state", "owner", "execution")

    async def _job(self, execution: int) -> InferenceJob | None:
        job: Any = await self._broker.hget(claim_key(self.request_id, execution), "job")
        return None if job is None else decode_job(job)

    async def _check_alive(self, execution: AnsweringExecution) -> None:
        """Raise an error if the log has nothing new and no more events can follow."""
        key = claim_key(self.request_id, execution.number)
        if execution.state == "failed":
            raise ApiError("worker_lost", WORKER_LOST)
        if execution.state == "cancelled":
            raise ApiError("cancelled", "The request was cancelled.")
        if (
            execution.state == "running"
            and execution.owner is not None
            and self._dispatcher.replicas.is_lost(execution.owner)
        ):
            job = await self._job(execution.number)
            if job is not None and await self._dispatcher.fail(job, execution.attempt, "worker_lost"):
                raise ApiError("worker_lost", WORKER_LOST)
        if execution.state == "queued":
            gateway: Any = await self._broker.hget(key, "gateway")
            if gateway is None or not await self._broker.exists(gateway_stream(gateway.decode())):
                job = await self._job(execution.number)
                # No gateway would send its wakeup again.
                if job is not None and await self._dispatcher.withdraw_claim(job.billing_context):
                    raise ApiError("worker_lost", WORKER_LOST)
