"""The circuit breaker of one upstream and model, and the pauses that its rate limits demand of each credential."""

from __future__ import annotations

import time
from collections.abc import Callable

from inference_worker.worker.relay.failures import UpstreamFailed, overloaded

MAX_FAILURES = 5  # consecutive, before requests are rejected
FIRST_OPEN_SECONDS = 2.0  # doubles with each failed probe
MAX_OPEN_SECONDS = 60.0


class CircuitBreaker:
    """The state of an upstream: closed, open (requests are rejected), or half open (one request probes it)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0  # consecutive
        self._open_until = 0.0
        self._is_probing = False
        self._resumes_at: dict[int | None, float] = {}  # credential -> when its rate limit accepts requests again

    @property
    def is_open(self) -> bool:
        return self._failures >= MAX_FAILURES

    def check(self, credential: int | None) -> None:
        """Accept a request with the credential. The caller must then call one of the three `note_` methods.

        Raises:
            UpstreamFailed: the circuit is open, or the credential's rate limit is reached.
        """
        now = self._clock()
        if (pause := self._resumes_at.get(credential, now) - now) > 0:
            raise overloaded(pause)
        if not self.is_open:
            return
        if now < self._open_until or self._is_probing:
            raise overloaded(max(1.0, self._open_until - now))
        self._is_probing = True

    def note_success(self) -> None:
        self._failures, self._is_probing = 0, False

    def note_failure(self, failure: UpstreamFailed, credential: int | None = None) -> None:
        if failure.retry_after is not None and failure.is_capacity:
            now = self._clock()
            later = {key: moment for key, moment in self._resumes_at.items() if moment > now}
            later[credential] = max(later.get(credential, 0.0), now + failure.retry_after)
            self._resumes_at = later
        if not failure.is_outage:  # the upstream has responded
            self.note_success()
            return
        self._is_probing = False
        self._failures += 1
        if self.is_open:
            seconds = FIRST_OPEN_SECONDS * 2 ** min(self._failures - MAX_FAILURES, 10)
            self._open_until = self._clock() + min(seconds, MAX_OPEN_SECONDS)

    def note_abandoned(self) -> None:
        """Record that a request ended without showing the upstream's state."""
        self._is_probing = False
