"""Threads of a worker process that repeat a step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import redis
import structlog

log = structlog.get_logger(__name__)

CLOSING_SECONDS = 5.0


class PeriodicThread(threading.Thread):
    """A thread that repeats a step until it is closed. The errors of a step are logged and do not end the thread."""

    def __init__(
        self, name: str, step: Callable[[], None], interval_seconds: float, *, waits_first: bool = False
    ) -> None:
        """Create a thread.

        Args:
            interval_seconds: time from the end of a step to the next one.
            waits_first: whether the interval also precedes the first step.
        """
        super().__init__(name=name, daemon=True)
        self._step = step
        self._interval_seconds = interval_seconds
        self._waits_first = waits_first
        self._closing = threading.Event()

    def start(self) -> None:
        """Start the thread, unless it was started before."""
        if self.ident is None:
            super().start()

    def stop(self) -> None:
        """Let the thread end after the step that runs. A step may call it."""
        self._closing.set()

    def close(self) -> None:
        """Stop the thread, and wait for its end, for at most CLOSING_SECONDS."""
        self.stop()
        if self.is_alive():
            self.join(CLOSING_SECONDS)
            if self.is_alive():
                log.warning("thread_left", thread=self.name)

    def run(self) -> None:
        """Repeat the step until the thread is stopped."""
        if self._waits_first and self._closing.wait(self._interval_seconds):
            return
        while True:
            try:
                self._step()
            except redis.RedisError as exc:
                log.warning("broker_unreachable", thread=self.name, error=str(exc))
            except Exception:  # the executions of the process must not be affected
                log.exception("thread_step_failed", thread=self.name)
            if self._closing.wait(self._interval_seconds):
                return
