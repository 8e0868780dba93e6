"""The wait for a client that has disconnected and intends to return."""

from __future__ import annotations

import asyncio

from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core.multi_prompt import whole_id
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.lifecycle.active_request import ActiveRequest

RESUME_SECONDS = 30.0  # how long an execution continues without a reader
POLL_SECONDS = 1.0


class ClientReturn:
    """The waits of one gateway."""

    def __init__(self, active_requests: ActiveRequests, subscribers: StreamSubscribers) -> None:
        self._active_requests = active_requests
        self._subscribers = subscribers
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End all waits."""
        self._stopping.set()

    async def wait(self, active: ActiveRequest) -> bool:
        """Let the execution continue for a while without a reader, and as long as it has subscribers.

        Returns:
            False if this gateway stops. The execution continues for clients that resume it at another gateway.
        """
        key_revoked = asyncio.Event()
        with self._active_requests.register(active.key, lambda _: key_revoked.set()):
            request_id = whole_id(active.request_id)
            await self._subscribers.record_client_left(request_id)
            unread_seconds = 0.0
            while unread_seconds < RESUME_SECONDS and not active.execution.is_finished and not key_revoked.is_set():
                if self._stopping.is_set():
                    return False
                await _wait_for_first(key_revoked, self._stopping, seconds=POLL_SECONDS)
                unread_seconds = 0.0 if await self._subscribers.has_any(request_id) else unread_seconds + POLL_SECONDS
        return True


async def _wait_for_first(*events: asyncio.Event, seconds: float) -> bool:
    """Wait until one of the events is set or the time has passed. Return whether one is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)
