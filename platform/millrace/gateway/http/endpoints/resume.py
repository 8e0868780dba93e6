"""GET /v1/streams/{request_id} with Last-Event-ID: resume a stream at any gateway, without a gap or a repetition.

The response is written again from the start of the request's log, in the request's dialect, and the part that the
client has received is skipped. While the request runs, the log is polled every few milliseconds. Nothing is needed from
the gateway that dispatched the request, which may have failed.
"""

from __future__ import annotations

import asyncio
import contextlib

from inference_worker.contract.messages import End
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.dispatch.stream_follower import StreamFollower, StreamNotFound
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints.inference import truncation_headers
from millrace.gateway.protocols.answer_validity import checked_events
from millrace.gateway.protocols.dialects import API_DIALECTS, OPENAI
from millrace.gateway.protocols.writers import WRITERS


class ResumeStream(HttpConsumer):
    endpoint = "streams"
    method = "GET"
    takes_head = False

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        self._follower = StreamFollower(self.gateway.dispatcher, self.stream_id, key.tenant_id, key.project_id)
        try:
            response_spec = await self._follower.response_spec()  # checks that the project has this stream
            self.check(response_spec)
            last_received = self.last_received()
            async with self.gateway.subscribers.subscription(self.stream_id) as subscriber_id:
                await self._follow(last_received, subscriber_id)
        except StreamNotFound:
            raise ApiError("not_found", f"There is no stream {self.stream_id!r}, or it is no longer stored.") from None

    @property
    def stream_id(self) -> str:
        return self.path_arguments["request_id"]

    def check(self, response_spec: ResponseSpec) -> None:
        """Check that the stream can be resumed here, and set its dialect.

        Raises:
            StreamNotFound: it cannot be resumed here.
        """
        if response_spec.dialect not in WRITERS:
            raise StreamNotFound  # a summary or a shadow, whose events are not a response
        self.api_dialect = API_DIALECTS.get(response_spec.dialect, OPENAI)

    async def _follow(self, last_received: int, subscriber_id: str) -> None:
        is_complete = False
        try:
            self.begin_heartbeat(list)
            events = checked_events(self._follower.events(), self._follower.response_spec)
            event = await anext(events)
            response_spec = await self._follower.response_spec()
            self.writer = writer = self.gateway.service.writer(response_spec)
            sent = 0
            headers = [(b"x-millrace-model", response_spec.model.encode())]
            await self.begin_events(headers + truncation_headers(response_spec))
            while True:
                chunks = writer.stream(event)
                unsent = chunks[max(0, last_received + 1 - sent) :]
                is_complete = isinstance(event, End)
                if unsent or is_complete:
                    await self.send_events(unsent, sent + len(chunks) - len(unsent), last=is_complete)
                if is_complete:
                    return
                sent += len(chunks)
                event = await anext(events)
        finally:
            await self._leave(subscriber_id, is_complete)

    def last_received(self) -> int:
        """Return the number of the last event that the client has received, or -1."""
        text = self.headers.get(b"last-event-id", b"").decode("latin-1")
        if not text:
            return -1
        name, _, number = text.rpartition(":")
        if name != self.stream_id or not number.isascii() or not number.isdigit() or len(number) > 9:
            raise invalid(
                "Last-Event-ID", f"Last-Event-ID must be {self.stream_id}:<number>, as in the stream's event IDs."
            )
        return int(number)

    async def _leave(self, subscriber_id: str, is_complete: bool) -> None:
        """Unsubscribe from the stream. Cancel the execution if no subscriber is left and none intends to return."""
        with contextlib.suppress(Exception):  # the request has a deadline if this fails
            await asyncio.shield(self._unsubscribe(subscriber_id, is_complete))

    async def _unsubscribe(self, subscriber_id: str, is_complete: bool) -> None:
        is_last = await self.gateway.subscribers.leave(self.stream_id, subscriber_id)
        is_returning = self.headers.get(b"x-millrace-resume") == b"1" and self.key_error is None
        if is_last and not is_complete and not is_returning:
            await self._follower.cancel()
