"""The requests that wait, and in what order they will be served. Free of torch.

The order is (class, tenant's virtual counter, the tenant's own priority, shortest expected first, arrival). Shortness
is worth a bounded time only: a request is put back behind those that came up to `expected tokens / AGING_TOKENS`
seconds later, so it grows old and is served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from inference_worker.engine.fairness import OUTPUT_WEIGHT, Tenants, TenantShare
from inference_worker.engine.request import ServiceClass
from inference_worker.engine.sequence import Sequence

AGING_TOKENS = 2000.0  # expected tokens that weigh as much as a second's wait
CLASS_SECONDS = 20.0  # an interactive request counts as a class higher for each of these it has waited
GROUPING_WINDOW = 8  # first requests of a tenant among which the one with most of its prefix cached goes first
MOST_PASSED = 64  # requests of a line that are looked at in a step and cannot begin yet

_Key = tuple[int, int, float, int]


class _Line:
    """One tenant's waiting requests of one class."""

    def __init__(self, tenant: TenantShare, service_class: ServiceClass) -> None:
        self.tenant = tenant
        self.service_class = service_class
        self.requests: list[tuple[_Key, Sequence]] = []

    def rank(self, now: float) -> int:
        """The class the line's first counts as: interactive ones rise with age, batch never does."""
        if self.service_class is ServiceClass.BATCH:
            return ServiceClass.BATCH
        waited = now - self.requests[0][1].waiting_since
        return max(0, self.service_class - int(waited / CLASS_SECONDS))


class WaitingQueue:
    """All waiting requests.

    Args:
        tenants: their accounts.
        num_cached: how many of a request's tokens are in the cache now.
    """

    def __init__(self, tenants: Tenants, num_cached: Callable[[Sequence], int]) -> None:
        self._tenants = tenants
        self._num_cached = num_cached
        self._lines: dict[tuple[str, ServiceClass], _Line] = {}
        self._keys: dict[Sequence, _Key] = {}
        self._expiring: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._keys))

    def add(self, seq: Sequence) -> None:
        request = seq.request
        tenant = self._tenants[request.tenant]
        where = (request.tenant, request.service_class)
        line = self._lines.get(where)
        if line is None:
            line = self._lines[where] = _Line(tenant, request.service_class)
        output = tenant.expected_output(seq.num_prompt_tokens, seq.params)
        expected = seq.num_prompt_tokens + OUTPUT_WEIGHT * output
        # What has begun goes on first: its blocks are still cached.
        key = (request.priority, 0 if seq.preemptions else 1, request.arrival * AGING_TOKENS + expected, seq.number)
        self._keys[seq] = key
        insort(line.requests, (key, seq), key=lambda entry: entry[0])
        if request.expires_at is not None:
            self._expiring.add(seq)
        tenant.num_waiting += 1

    def remove(self, seq: Sequence) -> None:
        key = self._keys.pop(seq)
        where = (seq.request.tenant, seq.request.service_class)
        line = self._lines[where]
        del line.requests[bisect_left(line.requests, key, key=lambda entry: entry[0])]
        self._expiring.discard(seq)
        line.tenant.num_waiting -= 1
        if not line.requests:
            del self._lines[where]

    def in_order(self, now: float, batch: bool) -> Iterator[Sequence]:
        """Waiting requests, best first: the batch class alone, or all others.

        Counters are looked at anew for each, and a request may be removed when it has been given out.
        """
        passed: dict[_Line, set[Sequence]] = {}
        while True:
            lines = [
                line for line in self._lines.values()
                if (line.service_class is ServiceClass.BATCH) == batch
                and len(passed.get(line, ())) < min(len(line.requests), MOST_PASSED)
            ]  # fmt: skip
            if not lines:
                return
            _, _, line = min(((line.rank(now), line.tenant.served), index, line) for index, line in enumerate(lines))
            seq = self._first(line, passed.setdefault(line, set()))
            seq.rank = line.rank(now)
            yield seq
            if seq in self._keys:
                passed[line].add(seq)

    def heads(self, now: float) -> list[tuple[int, TenantShare, ServiceClass]]:
        """Each interactive line: the class it counts as, its tenant and its own class; best first."""
        lines = [line for line in self._lines.values() if line.service_class is not ServiceClass.BATCH]
        ranked = [(line.rank(now), line.tenant, line.service_class) for line in lines]
        return sorted(ranked, key=lambda entry: (entry[0], entry[1].served))

    def first(self, tenant: str, service_class: ServiceClass, rank: int) -> Sequence | None:
        """The request of that line to be served next, if there is one."""
        line = self._lines.get((tenant, service_class))
        if line is None:
            return None
        seq = self._first(line, set())
        seq.rank = rank
        return seq

    def expired(self, now: float) -> list[Sequence]:
        """Requests that nobody waits for any more, and that have not begun."""
        return [
            seq for seq in self._expiring
            if (seq.request.expires_at or 0.0) <= now and seq.group.prompt_usage is None
        ]  # fmt: skip

    def check_integrity(self) -> None:
        """Check that each request is in its line, in order.

        Raises:
            RuntimeError: one is not.
        """
        lined = [entry for line in self._lines.values() for entry in line.requests]
        if {seq: key for key, seq in lined} != self._keys or len(lined) != len(self._keys):
            raise RuntimeError("queue integrity: a request is in no line, or in two")
        for line in self._lines.values():
            keys = [key for key, _ in line.requests]
            if keys != sorted(keys) or not keys:
                raise RuntimeError("queue integrity: a line is empty or out of order")

    def _first(self, line: _Line, passed: set[Sequence]) -> Sequence:
        """The line's next: of the first few of equal priority the one that finds most of its tokens cached."""
        window: list[tuple[_Key, Sequence]] = []
        for key, seq in line.requests:
            if seq not in passed:
                if window and key[:2] != window[0][0][:2]:
                    break
                window.append((key, seq))
                if len(window) == GROUPING_WINDOW:
                    break
        if len(window) == 1:
            return window[0][1]
        return min(window, key=lambda entry: (entry[0][2] - self._num_cached(entry[1]), entry[0][3]))[1]
