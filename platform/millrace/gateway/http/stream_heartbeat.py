"""Headers and pings of a stream that is silent, so that proxies and clients do not end its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PING_SECONDS = 10.0  # time without a byte after which a ping is sent


class StreamHeartbeat:
    """A timer beside the task of a stream. Must be stopped before the end of the stream is sent.

    Args:
        seconds: time until the headers are sent if no event arrives before.
        start: sends the headers.
        ping: sends a ping, unless the client reads slowly.
        last_sent: returns the time of the loop at which the last event was sent.
    """

    def __init__(
        self,
        seconds: float,
        start: Callable[[], Awaitable[None]],
        ping: Callable[[], Awaitable[None]],
        last_sent: Callable[[], float],
    ) -> None:
        self._start, self._ping, self._last_sent = start, ping, last_sent
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._beat)
        self._is_stopped = False
        self._sending: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Wait until nothing is being sent by the timer."""
        if self._sending is None:
            return
        try:
            await asyncio.shield(self._sending)
        except asyncio.CancelledError:
            self._sending.cancel()
            raise

    async def stop(self) -> None:
        """Send no more pings."""
        self._is_stopped = True
        self._timer.cancel()
        await self.settle()

    def cancel(self) -> None:
        """Stop without waiting, since the request has ended."""
        self._is_stopped = True
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _beat(self) -> None:
        silent = self._loop.time() - self._last_sent()
        if silent < PING_SECONDS:
            self._timer = self._loop.call_later(PING_SECONDS - silent, self._beat)
        else:
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        await self._start()
        await self._ping()
        if not self._is_stopped:
            self._timer = self._loop.call_later(PING_SECONDS, self._beat)
