"""GET /v1/streams/{request_id} with Last-Event-ID: go on with a stream, at any gateway, without gap or repeat.

The request's log is written out again from its start, in the dialect it was asked in, and what the client has had is
left out. While the request runs, the log is looked at again every few milliseconds: a resumed stream needs nothing
from the gateway that dispatched it, which may be gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from inference_worker.protocol import End, Failed, claim_key, decode_job
from millrace.gateway.errors import ApiError, invalid
from millrace.gateway.forms import Form, Writer, decode_form
from millrace.gateway.http import HttpConsumer
from millrace.gateway.service import WRITERS
from millrace.gateway.streams import LogEvent, read_log
from tenants.snapshot import KeySnapshot

POLL_SECONDS = 0.05
READER_SECONDS = 10  # how long a reader's mark outlives it


class ResumeStream(HttpConsumer):
    endpoint = "streams"
    method = "GET"

    async def handle(self, body: bytes) -> None:
        key = await self.authenticate("inference")
        self._resumed = self.path_arguments["request_id"]
        form = await self._form(key)
        had = self._last_event_id()
        writer = WRITERS[form.dialect](form)
        attempt, next_seq, sent = 0, 0, 0
        started = finished = False
        try:
            while True:
                attempt_now, state, owner = await self._claim()
                if attempt_now != attempt:
                    if started:
                        raise ApiError(
                            "worker_lost", "The worker that served this request was lost; please send it again."
                        )
                    attempt, next_seq, sent, writer = attempt_now, 0, 0, WRITERS[form.dialect](form)
                events = await read_log(self.gateway.broker, self._resumed, attempt, next_seq)
                next_seq += len(events)
                if not started:
                    await self.start_stream([(b"x-millrace-model", form.model.encode())])
                    started = True
                sent = await self._write_out(writer, events, sent, had)
                if events and isinstance(events[-1], End):
                    finished = True
                    return
                if not events:
                    await self._check_alive(state, owner, attempt)
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            if not finished:
                await self._leave()

    @property
    def stream_id(self) -> str:
        return self._resumed

    async def _form(self, key: KeySnapshot) -> Form:
        claim: Any = await self.gateway.broker.hmget(claim_key(self._resumed, 0), "tenant", "form")
        tenant, form = claim
        if tenant is None or form is None or int(tenant) != key.tenant_id:
            raise ApiError("not_found", f"There is no stream {self._resumed!r}, or it is no longer kept.")
        return decode_form(form)

    def _last_event_id(self) -> int:
        """The number of the last event the client has had; -1 for none."""
        text = self.headers.get(b"last-event-id", b"").decode("latin-1")
        if not text:
            return -1
        name, _, number = text.rpartition(":")
        if name != self._resumed or not number.isascii() or not number.isdigit() or len(number) > 9:
            raise invalid("Last-Event-ID", f"Last-Event-ID must be {self._resumed}:<number>, as the stream gave it.")
        return int(number)

    async def _claim(self) -> tuple[int, str, str | None]:
        broker, key = self.gateway.broker, claim_key(self._resumed, 0)
        claim: Any = await broker.hmget(key, "attempt", "state", "owner")
        attempt, state, owner = claim
        if attempt is None:
            raise ApiError("not_found", f"The stream {self._resumed!r} is no longer kept.")
        await broker.set(f"reader:{self._resumed}", 1, ex=READER_SECONDS)
        return int(attempt), state.decode(), owner.decode() if owner is not None else None

    async def _write_out(self, writer: Writer, events: list[LogEvent], sent: int, had: int) -> int:
        for event in events:
            if isinstance(event, Failed):
                raise ApiError(event.code, event.message, event.param)
            if isinstance(event, End) and event.finish_reason == "cancelled":
                raise ApiError("cancelled", "The request was cancelled.")
            datas = writer.stream(event)
            fresh = datas[max(0, had + 1 - sent) :]
            if fresh or isinstance(event, End):
                await self.send_events(fresh, sent + len(datas) - len(fresh), last=isinstance(event, End))
            sent += len(datas)
        return sent

    async def _check_alive(self, state: str, owner: str | None, attempt: int) -> None:
        """Nothing new in the log: is anything still to come?"""
        dispatcher = self.gateway.dispatcher
        lost = "The worker that served this request was lost; please send it again."
        if state == "failed":
            raise ApiError("worker_lost", lost)
        if state == "cancelled":
            raise ApiError("cancelled", "The request was cancelled.")
        if state == "running" and owner is not None and dispatcher.replicas.is_dead(owner):
            job: Any = await self.gateway.broker.hget(claim_key(self._resumed, 0), "job")
            if job is not None and await dispatcher.fail(decode_job(job), attempt, "worker_lost"):
                raise ApiError("worker_lost", lost)

    async def _leave(self) -> None:
        """A reader that goes away without the word that it means to return takes the generation with it."""
        if self.headers.get(b"x-millrace-resume") != b"1":
            with contextlib.suppress(Exception):  # best effort: the request has a deadline in any case
                await asyncio.shield(self.gateway.dispatcher.cancel(self._resumed, 0))
