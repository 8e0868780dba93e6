"""GET /v1/streams/{request_id} with Last-Event-ID: go on with a stream, at any gateway, without gap or repeat.

The request's log is written out again from its start, in the dialect it was asked in, and what the client has had is
left out. While the request runs, the log is looked at again every few milliseconds: a resumed stream needs nothing
from the gateway that dispatched it, which may be gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any, NamedTuple

from inference_worker.protocol import End, Failed, claim_key, decode_job
from millrace.gateway.errors import ApiError, invalid
from millrace.gateway.forms import Form, Writer, decode_form
from millrace.gateway.http import HttpConsumer
from millrace.gateway.readers import READER_SECONDS
from millrace.gateway.streams import LOST, EventsLost, LogEvent, read_log
from millrace.gateway.writers import make_writer
from tenants.snapshot import KeySnapshot

POLL_SECONDS = 0.05
WORKER_LOST = "The worker that served this request was lost; please send it again."


class Leg(NamedTuple):
    """The leg that answers, as its claim has it."""

    number: int
    attempt: int
    state: str
    owner: str | None


class ResumeStream(HttpConsumer):
    endpoint = "streams"
    method = "GET"

    async def handle(self, body: bytes) -> None:
        key = await self.authenticate("inference")
        self._resumed = self.path_arguments["request_id"]
        self._reader, self._marked_at = secrets.token_hex(8), float("-inf")
        form = await self._form(key, 0)
        had = self._last_event_id()
        writer = self._writer(form)
        attempt, next_seq, sent = 0, 0, 0
        started = finished = False
        try:
            while True:
                leg = await self._leg()
                if leg.attempt != attempt:
                    if next_seq:  # what was sent is not a part of the answer any more
                        raise ApiError("worker_lost", WORKER_LOST)
                    form = await self._form(key, leg.number)
                    attempt, writer = leg.attempt, self._writer(form)
                events = await self._read(attempt, next_seq)
                next_seq += len(events)
                if events and not started:
                    self._raise_failure(events[0])  # while it can still be a status of its own
                    await self.start_stream([(b"x-millrace-model", form.model.encode())])
                    started = True
                sent = await self._write_out(writer, events, sent, had)
                if events and isinstance(events[-1], End):
                    finished = True
                    return
                if not events:
                    await self._check_alive(leg)
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            await self._leave(finished)

    @property
    def stream_id(self) -> str:
        return self._resumed

    async def _form(self, key: KeySnapshot, leg: int) -> Form:
        claim: Any = await self.gateway.broker.hmget(claim_key(self._resumed, leg), "tenant", "form")
        tenant, form = claim
        if tenant is None or form is None or int(tenant) != key.tenant_id:
            raise ApiError("not_found", f"There is no stream {self._resumed!r}, or it is no longer kept.")
        return decode_form(form)

    def _writer(self, form: Form) -> Writer:
        model = self.gateway.router.served(form.model)
        if model is None:
            raise ApiError("not_found", f"The model {form.model!r} of this stream is not served here any more.")
        return make_writer(form, model.tokenizer)

    def _last_event_id(self) -> int:
        """The number of the last event the client has had; -1 for none."""
        text = self.headers.get(b"last-event-id", b"").decode("latin-1")
        if not text:
            return -1
        name, _, number = text.rpartition(":")
        if name != self._resumed or not number.isascii() or not number.isdigit() or len(number) > 9:
            raise invalid("Last-Event-ID", f"Last-Event-ID must be {self._resumed}:<number>, as the stream gave it.")
        return int(number)

    async def _leg(self) -> Leg:
        if time.monotonic() - self._marked_at > READER_SECONDS / 3:
            self._marked_at = time.monotonic()
            await self.gateway.readers.mark(self._resumed, self._reader)
        claim: Any = await self._claim(0)
        number = int(claim[3] or 0)
        if number:
            claim = await self._claim(number)
        attempt, state, owner, _ = claim
        if attempt is None:
            raise ApiError("not_found", f"The stream {self._resumed!r} is no longer kept.")
        return Leg(number, int(attempt), state.decode(), owner.decode() if owner is not None else None)

    async def _claim(self, leg: int) -> Any:
        key = claim_key(self._resumed, leg)
        return await self.gateway.broker.hmget(key, "attempt", "state", "owner", "leg")

    async def _read(self, attempt: int, next_seq: int) -> list[LogEvent]:
        try:
            return await read_log(self.gateway.broker, self._resumed, attempt, next_seq)
        except EventsLost:
            raise ApiError("stream_lost", LOST) from None

    def _raise_failure(self, event: LogEvent) -> None:
        if isinstance(event, Failed):
            raise ApiError(event.code, event.message, event.param)
        if isinstance(event, End) and event.finish_reason == "cancelled":
            raise ApiError("cancelled", "The request was cancelled.")

    async def _write_out(self, writer: Writer, events: list[LogEvent], sent: int, had: int) -> int:
        for event in events:
            self._raise_failure(event)
            if isinstance(event, Failed):
                continue
            datas = writer.stream(event)
            fresh = datas[max(0, had + 1 - sent) :]
            if fresh or isinstance(event, End):
                await self.send_events(fresh, sent + len(datas) - len(fresh), last=isinstance(event, End))
            sent += len(datas)
        return sent

    async def _check_alive(self, leg: Leg) -> None:
        """Nothing new in the log: is anything still to come?"""
        dispatcher = self.gateway.dispatcher
        if leg.state == "failed":
            raise ApiError("worker_lost", WORKER_LOST)
        if leg.state == "cancelled":
            raise ApiError("cancelled", "The request was cancelled.")
        if leg.state == "running" and leg.owner is not None and dispatcher.replicas.is_dead(leg.owner):
            job: Any = await self.gateway.broker.hget(claim_key(self._resumed, leg.number), "job")
            if job is not None and await dispatcher.fail(decode_job(job), leg.attempt, "worker_lost"):
                raise ApiError("worker_lost", WORKER_LOST)

    async def _leave(self, finished: bool) -> None:
        """The last reader that goes away without the word that it means to return takes the generation with it."""
        with contextlib.suppress(Exception):  # best effort: the request has a deadline in any case
            await asyncio.shield(self._leave_to_others(finished))

    async def _leave_to_others(self, finished: bool) -> None:
        alone = await self.gateway.readers.leave(self._resumed, self._reader)
        returns = self.headers.get(b"x-millrace-resume") == b"1" and self.key_died is None
        if alone and not finished and not returns:
            await self.gateway.dispatcher.cancel_claim(self._resumed, (await self._leg()).number)
