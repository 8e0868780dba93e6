"""GET /v1/streams/{request_id} with Last-Event-ID: go on with a stream, at any gateway, without gap or repeat.

The request's log is written out again from its start, in the dialect it was asked in, and what the client has had is
left out. While the request runs, the log is looked at again every few milliseconds: a resumed stream needs nothing
from the gateway that dispatched it, which may be gone.
"""

from __future__ import annotations

import asyncio
import contextlib

from inference_worker.contract.messages import End
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.dispatch.stream_follower import StreamFollower, StreamNotFound
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.protocols.dialects import OPENAI, WORDS


class ResumeStream(HttpConsumer):
    endpoint = "streams"
    method = "GET"

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        self._following = StreamFollower(self.gateway.dispatcher, self.stream_id, key.tenant_id)
        try:
            form = await self._following.form()  # is it there, and theirs?
            self.check(form)
            had = self.last_had()
            async with self.gateway.readers.reading(self.stream_id) as reader:
                await self._follow(had, reader)
        except StreamNotFound:
            raise ApiError("not_found", f"There is no stream {self.stream_id!r}, or it is no longer kept.") from None

    @property
    def stream_id(self) -> str:
        return self.path_arguments["request_id"]

    def check(self, form: ResponseSpec) -> None:
        """Check that the stream can be resumed here, and set its dialect.

        Raises:
            Gone: it may not.
        """
        self.words = WORDS.get(form.dialect, OPENAI)

    async def _follow(self, had: int, reader: str) -> None:
        finished = False
        try:
            events = self._following.events()
            event = await anext(events)
            form = await self._following.form()
            writer, sent = self.gateway.service.writer(form), 0
            await self.start_stream([(b"x-millrace-model", form.model.encode())])
            while True:
                datas = writer.stream(event)
                fresh = datas[max(0, had + 1 - sent) :]
                finished = isinstance(event, End)
                if fresh or finished:
                    await self.send_events(fresh, sent + len(datas) - len(fresh), last=finished)
                if finished:
                    return
                sent += len(datas)
                event = await anext(events)
        finally:
            await self._leave(reader, finished)

    def last_had(self) -> int:
        """Return the number of the last event the client has had; -1 for none."""
        text = self.headers.get(b"last-event-id", b"").decode("latin-1")
        if not text:
            return -1
        name, _, number = text.rpartition(":")
        if name != self.stream_id or not number.isascii() or not number.isdigit() or len(number) > 9:
            raise invalid("Last-Event-ID", f"Last-Event-ID must be {self.stream_id}:<number>, as the stream gave it.")
        return int(number)

    async def _leave(self, reader: str, finished: bool) -> None:
        """Leave the stream. Cancel the execution if no reader is left and none intends to return."""
        with contextlib.suppress(Exception):  # best effort: the request has a deadline in any case
            await asyncio.shield(self._leave_to_others(reader, finished))

    async def _leave_to_others(self, reader: str, finished: bool) -> None:
        alone = await self.gateway.readers.leave(self.stream_id, reader)
        returns = self.headers.get(b"x-millrace-resume") == b"1" and self.key_died is None
        if alone and not finished and not returns:
            await self._following.cancel()
