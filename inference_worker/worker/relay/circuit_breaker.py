"""The circuit breaker of one upstream and model, and the pauses that its rate limits demand of each credential.

The failures of one tenant pause only that tenant, since its requests may be their cause. Failures of several tenants,
and failures to connect, open the circuit of the upstream, which pauses all tenants. Failures with a tenant's own
credential pause only the requests with that credential.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from inference_worker.worker.relay.failures import UpstreamFailed, make_overload_failure, requester_paused

MAX_FAILURES = 5  # in a row, before requests are rejected
FIRST_OPEN_SECONDS = 2.0  # doubles with each failed probe
MAX_OPEN_SECONDS = 60.0
HEAD_START_SECONDS = 1.0  # after a pause of all tenants, in which only a tenant without failures can probe
FORGET_SECONDS = 600.0  # after which failures are no longer counted
MAX_REQUESTERS = 1000  # with failures, in memory: those with the newest failures


class Requester(NamedTuple):
    """The requests whose failures are counted together: those of a tenant, or of a tenant's own credential."""

    tenant: int
    own_credential: int | None = None  # the tenant's credential; None: that of the platform, or none


@dataclass(eq=False)
class UpstreamAttempt:
    """A request that was accepted, until its result is recorded."""

    requester: Requester
    credential: int | None


class _Circuit:
    """Failures in a row, and their circuit.

    A circuit is closed, open (requests are rejected), or half open (one request probes it).
    """

    def __init__(self) -> None:
        self.failures = 0
        self.failed_at = 0.0  # the newest failure
        self.probe: UpstreamAttempt | None = None
        self._openings = 0
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._openings > 0

    def pause(self, now: float, head_start: float = 0.0) -> float:
        """Return the seconds until a request is accepted; 0: it is accepted now."""
        if not self.is_open:
            return 0.0
        if self.probe is not None:
            return max(1.0, self._open_until - now)
        return max(0.0, self._open_until + head_start - now)

    def note_failure(self, attempt: UpstreamAttempt, now: float, *, can_open: bool = True) -> None:
        """Count a failure. It extends the pause of an open circuit only if it is the probe's."""
        self.failures += 1
        self.failed_at = now
        if self.probe is attempt if self.is_open else can_open and self.failures >= MAX_FAILURES:
            self._openings += 1
            seconds = FIRST_OPEN_SECONDS * 2 ** min(self._openings - 1, 10)
            self._open_until = now + min(seconds, MAX_OPEN_SECONDS)

    def end_probe(self, attempt: UpstreamAttempt) -> None:
        if self.probe is attempt:
            self.probe = None


class CircuitBreaker:
    """The circuits of an upstream and of the requesters with failures."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shared = _Circuit()  # counts failures that may be the upstream's
        self._failed_tenant: int | None = None  # the first tenant of these failures
        self._is_common = False  # they are of several tenants, or a connection could not be opened
        self._requesters: dict[Requester, _Circuit] = {}  # the newest failure is the last
        self._resumes_at: dict[int | None, float] = {}  # credential -> when its rate limit accepts requests again

    @property
    def is_open(self) -> bool:
        """Return whether the circuit of the upstream is open, for all tenants."""
        return self._shared.is_open

    @property
    def num_paused(self) -> int:
        """Return the number of requesters whose own circuit is open. Any thread may read it."""
        since = self._clock() - FORGET_SECONDS
        return sum(circuit.is_open and circuit.failed_at > since for circuit in list(self._requesters.values()))

    def enter(self, requester: Requester, credential: int | None) -> UpstreamAttempt:
        """Accept a request with the credential. The caller must then call one of the three `note_` methods.

        Raises:
            UpstreamFailed: a circuit is open, or the credential's rate limit is reached.
        """
        now = self._clock()
        self._forget(now)
        if (pause := self._resumes_at.get(credential, now) - now) > 0:
            raise make_overload_failure(pause)
        own = self._requesters.get(requester)
        if own is not None and (pause := own.pause(now)) > 0:
            raise requester_paused(pause, is_credential=requester.own_credential is not None)
        if (pause := self._shared.pause(now, 0.0 if own is None else HEAD_START_SECONDS)) > 0:
            raise make_overload_failure(pause)
        attempt = UpstreamAttempt(requester, credential)
        for circuit in (own, self._shared):
            if circuit is not None and circuit.is_open:
                circuit.probe = attempt
        return attempt

    def note_success(self, attempt: UpstreamAttempt) -> None:
        if self._shared.is_open:
            self._requesters = {}  # the upstream had failed, not their requests
        else:
            self._requesters.pop(attempt.requester, None)
        self._reset_shared()

    def note_failure(self, attempt: UpstreamAttempt, failure: UpstreamFailed) -> None:
        now = self._clock()
        if failure.retry_after is not None and failure.is_capacity:
            later = {key: moment for key, moment in self._resumes_at.items() if moment > now}
            later[attempt.credential] = max(later.get(attempt.credential, 0.0), now + failure.retry_after)
            self._resumes_at = later
        if not failure.is_outage:  # the upstream has responded
            self.note_success(attempt)
            return
        self._forget(now)
        requester = attempt.requester
        if not failure.is_unreachable:
            own = self._requesters.pop(requester, None) or _Circuit()
            own.note_failure(attempt, now)
            self._requesters[requester] = own
            self._forget(now)
        if failure.is_unreachable or requester.own_credential is None:
            tenant = self._failed_tenant if self._failed_tenant is not None else requester.tenant
            self._failed_tenant = tenant
            self._is_common = self._is_common or failure.is_unreachable or tenant != requester.tenant
            self._shared.note_failure(attempt, now, can_open=self._is_common)
        self.note_abandoned(attempt)

    def note_abandoned(self, attempt: UpstreamAttempt) -> None:
        """Record that a request ended without showing the upstream's state."""
        self._shared.end_probe(attempt)
        if (own := self._requesters.get(attempt.requester)) is not None:
            own.end_probe(attempt)

    def _reset_shared(self) -> None:
        self._shared, self._failed_tenant, self._is_common = _Circuit(), None, False

    def _forget(self, now: float) -> None:
        """Forget old failures, and the oldest ones if they are too many."""
        while self._requesters:
            oldest = next(iter(self._requesters))
            is_old = now - self._requesters[oldest].failed_at >= FORGET_SECONDS
            if not is_old and len(self._requesters) <= MAX_REQUESTERS:
                break
            del self._requesters[oldest]
        if not self.is_open and self._shared.failures and now - self._shared.failed_at >= FORGET_SECONDS:
            self._reset_shared()
