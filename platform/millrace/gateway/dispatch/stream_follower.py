"""Reading a request's answer from its log, also at a gateway that did not dispatch it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from inference_worker.contract import claims
from inference_worker.contract.messages import (
    USAGE_STREAM,
    AnswerEvent,
    End,
    Failed,
    claim_key,
    decode_job,
    gateway_stream,
)
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.multi_prompt import merged, part_id
from millrace.gateway.core.types import ResponseSpec, decode_response_spec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.streams import LOST, EventsLost, read_log

POLL_SECONDS = 0.05
WORKER_LOST = "The worker that served this request was lost; please send it again."


class AnsweringExecution(NamedTuple):
    """The execution that answers, as its claim has it."""

    number: int
    attempt: int
    state: str
    owner: str | None


class StreamNotFound(Exception):
    """There is nothing to follow: it was never sent, or is no longer kept."""


class StreamFollower:
    """One request that is followed."""

    def __init__(self, dispatcher: Dispatcher, request_id: str, tenant_id: int) -> None:
        self.request_id = request_id
        self._dispatcher = dispatcher
        self._broker = dispatcher.broker
        self._tenant_id = tenant_id
        self._withdraw = dispatcher.broker.register_script(claims.WITHDRAW)

    async def form(self) -> ResponseSpec:
        """Return the response spec of the execution that answers.

        Raises:
            Gone: there is no such request of this tenant.
        """
        number = (await self.execution()).number
        claim: Any = await self._broker.hmget(claim_key(self.request_id, number), "tenant", "form")
        tenant, form = claim
        if tenant is None or form is None or int(tenant) != self._tenant_id:
            raise StreamNotFound
        return decode_response_spec(form)

    async def execution(self) -> AnsweringExecution:
        """Return the execution that answers now.

        Raises:
            Gone: it is no longer kept.
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
        """Yield the answer's events from the first one on, as they come; the last one is its end. Until the first has
        come another execution may take over, and the form be another one.

        Raises:
            ApiError: the request failed, or nobody works on it any more.
            Gone: it is no longer kept.
        """
        parts = [self._events(), *[part._sent_events(self) for part in await self._others()]]
        async for event in merged(parts, (await self.form()).n):
            yield event

    async def cancel(self) -> None:
        """Nobody wants the answer any more."""
        for part in (self, *await self._others()):
            with contextlib.suppress(StreamNotFound):
                await self._dispatcher.cancel_claim(part.request_id, (await part.execution()).number)

    async def _others(self) -> list[StreamFollower]:
        """Those of the request's further prompts."""
        names = [part_id(self.request_id, number) for number in range(1, (await self.form()).prompts)]
        return [StreamFollower(self._dispatcher, name, self._tenant_id) for name in names]

    async def _sent_events(self, first: StreamFollower) -> AsyncIterator[AnswerEvent]:
        """Yield the events, once it is sent: it may still wait where the request's first prompt was sent."""
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
                    raise ApiError("stream_lost", LOST) from None
                raise
            if execution.attempt != attempt:
                if next_seq:  # what was read is not a part of the answer any more
                    raise ApiError("worker_lost", WORKER_LOST)
                attempt = execution.attempt
            try:
                found = await read_log(self._broker, self.request_id, attempt, next_seq)
            except EventsLost:
                raise ApiError("stream_lost", LOST) from None
            for event in found:
                if isinstance(event, Failed):
                    raise ApiError(event.code, event.message, event.param)
                if isinstance(event, End) and event.finish_reason == "cancelled":
                    raise ApiError("cancelled", "The request was cancelled.")
                next_seq += 1
                yield event
                if isinstance(event, End):
                    return
            if not found:
                await self._check_alive(execution)
                await asyncio.sleep(POLL_SECONDS)

    async def _claim(self, execution: int) -> Any:
        return await self._broker.hmget(claim_key(self.request_id, execution), "attempt", "state", "owner", "execution")

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
            and self._dispatcher.replicas.is_dead(execution.owner)
        ):
            job: Any = await self._broker.hget(key, "job")
            if job is not None and await self._dispatcher.fail(decode_job(job), execution.attempt, "worker_lost"):
                raise ApiError("worker_lost", WORKER_LOST)
        if execution.state == "queued":
            gateway: Any = await self._broker.hget(key, "gateway")
            orphan = gateway is None or not await self._broker.exists(gateway_stream(gateway.decode()))
            if orphan and await self._withdraw(keys=[key, USAGE_STREAM]):  # nobody would ring for it again
                raise ApiError("worker_lost", WORKER_LOST)
