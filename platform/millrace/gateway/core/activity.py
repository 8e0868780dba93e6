"""The rest of a gateway without requests: its polls are rare then, and run again before the next request.

A poll reads data that requests use, such as changed keys and heartbeats. While there are requests, each poll has its
own interval. REST_AFTER_SECONDS after the last one all polls run together, every REST_SECONDS. The next request first
waits until each one whose data it uses has run again, so this data is no older than during activity.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

REST_AFTER_SECONDS = 10.0
REST_SECONDS = 2.0  # less than REPLICA_SUSPECT_SECONDS and the TTL of a gateway's heartbeat
REFRESH_SECONDS = 0.5  # a poll that takes longer delays no request further


class Activity:
    """Whether a gateway rests. `is_busy` returns whether it has unfinished work."""

    def __init__(self, is_busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_busy = is_busy
        self._clock = clock
        self._noted_at = clock()
        self._sleeping: set[Poll] = set()  # polls that rest
        self._outdated: set[Poll] = set()  # polls that run for the first time after a rest
        self._is_fresh = asyncio.Event()

    @property
    def is_resting(self) -> bool:
        return self._clock() - self._noted_at >= REST_AFTER_SECONDS and not self._is_busy()

    async def begin_request(self) -> None:
        """End the rest, and wait until the polls that requests read have run again."""
        self._noted_at = self._clock()
        await self.refresh()

    async def refresh(self) -> None:
        """Let the polls that rest run now, and wait for them at most REFRESH_SECONDS."""
        for poll in list(self._sleeping):
            self.wake(poll)
            poll.run_now()
        if not self._outdated:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFRESH_SECONDS):
                await self._is_fresh.wait()

    def finish(self, poll: Poll) -> None:
        """Record that a poll has run."""
        self._outdated.discard(poll)
        if not self._outdated:
            self._is_fresh.set()

    def rest(self, poll: Poll) -> float:
        """Record that a poll rests, and return the seconds until it runs again, concurrently with the others."""
        self._sleeping.add(poll)
        return REST_SECONDS - self._clock() % REST_SECONDS

    def wake(self, poll: Poll) -> None:
        """Record that a poll runs again. Its data is outdated until it has finished."""
        if poll in self._sleeping:
            self._sleeping.discard(poll)
            if poll.is_read_by_requests:
                self._outdated.add(poll)
                self._is_fresh.clear()

    def forget(self, poll: Poll) -> None:
        """Record that a poll has stopped."""
        self._sleeping.discard(poll)
        self.finish(poll)


class Poll:
    """The pauses of a task that polls. Without an activity it never rests.

    is_read_by_requests: whether requests use its data, so that the first one after a rest waits for it.
    """

    def __init__(self, activity: Activity | None = None, *, is_read_by_requests: bool = True) -> None:
        self._activity = activity
        self.is_read_by_requests = is_read_by_requests
        self._now = asyncio.Event()

    def run_now(self) -> None:
        """End the current pause, or the next one if the task is running."""
        self._now.set()

    async def pause(self, seconds: float, *, coalesce_seconds: float = 0.0) -> None:
        """Wait until the task runs again: after some seconds, or later while the gateway rests.

        Calls of `run_now` within `coalesce_seconds` of the first one count as one.
        """
        activity = self._activity
        if activity is not None:
            activity.finish(self)
            if activity.is_resting and not self._now.is_set():
                seconds = activity.rest(self)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._now.wait()
                    await asyncio.sleep(coalesce_seconds)
        except asyncio.CancelledError:
            if activity is not None:
                activity.forget(self)
            raise
        self._now.clear()
        if activity is not None:
            activity.wake(self)
