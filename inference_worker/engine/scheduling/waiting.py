"""The requests that wait, and the order in which they are served. Does not import torch.

The order is (class, tenant's virtual counter, the tenant's own priority, shortest expected first, arrival). Shortness
is worth a bounded time only: a request is put back behind those that came up to `expected tokens / AGING_TOKENS`
seconds later, so it grows old and is served.

Requests of one tenant and class form a line. Lines are kept sorted, so the cost of a step does not depend on their
number. A line changes its place only if its first request changes, its tenant's counter grows or its age passes a
multiple of CLASS_SECONDS.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from inference_worker.contract.request import ServiceClass
from inference_worker.engine.scheduling.fairness import OUTPUT_WEIGHT, FairShareTable, TenantShare
from inference_worker.engine.scheduling.ordered import GrowingOrder
from inference_worker.engine.scheduling.sequence import Sequence

AGING_TOKENS = 2000.0  # expected tokens that weigh as much as a second's wait
CLASS_SECONDS = 20.0  # an interactive request counts as a class higher for each of these it has waited
GROUPING_WINDOW = 8  # first requests of a tenant among which the one with most of its prefix cached goes first
MAX_SKIPPED_REQUESTS = 64  # requests of a line that are looked at in a step and cannot begin yet

_Key = tuple[int, int, float, int]


class _Line:
    """One tenant's waiting requests of one class."""

    def __init__(self, tenant: TenantShare, service_class: ServiceClass, number: int) -> None:
        self.tenant = tenant
        self.service_class = service_class
        self.number = number  # lines whose tenants have the same counter are served in this order
        self.requests: list[tuple[_Key, Sequence]] = []
        self.num_short = 0  # requests whose prompts are not long
        self.order: GrowingOrder[_Line] | None = None  # the one that contains the line
        self.ages_at = math.inf  # when the class that the line counts as is to be computed again

    def rank(self, now: float) -> int:
        """Return the class the line's first counts as: interactive ones rise with age, batch never does."""
        if self.service_class is ServiceClass.BATCH:
            return ServiceClass.BATCH
        return max(0, self.service_class - self._periods(now))

    def next_change(self, now: float) -> float:
        """Return when the line's rank may change by age alone: always after `now`."""
        if self.service_class is ServiceClass.BATCH or self.rank(now) == 0:
            return math.inf
        boundary = self.requests[0][1].waiting_since + (self._periods(now) + 1) * CLASS_SECONDS
        # Early by more than rounding errors, so that a step never finds an old rank; then again with each step.
        return max(boundary - 1e-6, math.nextafter(now, math.inf))

    def _periods(self, now: float) -> int:
        return int((now - self.requests[0][1].waiting_since) / CLASS_SECONDS)


class _Orders:
    """The lines that count as one class, by their tenants' counters."""

    def __init__(self) -> None:
        self.mixed: GrowingOrder[_Line] = GrowingOrder(lambda line: line.tenant.served)
        self.long: GrowingOrder[_Line] = GrowingOrder(lambda line: line.tenant.served)  # lines of long prompts only

    def of(self, line: _Line) -> GrowingOrder[_Line]:
        return self.mixed if line.num_short else self.long


class WaitingQueue:
    """All waiting requests.

    Args:
        tenants: their accounts.
        num_cached: how many of a request's tokens are in the cache now.
        is_long: whether the number of requests with a prompt as long as this one's is capped.
    """

    def __init__(
        self,
        tenants: FairShareTable,
        num_cached: Callable[[Sequence], int],
        is_long: Callable[[Sequence], bool] = lambda _: False,
    ) -> None:
        self._tenants = tenants
        self._num_cached = num_cached
        self._is_long = is_long
        self._lines: dict[tuple[str, ServiceClass], _Line] = {}
        self._numbers = itertools.count()
        self._orders = {int(rank): _Orders() for rank in ServiceClass}
        self._changed: set[_Line] = set()  # lines to be put in their place before the next one is chosen
        self._aging: GrowingOrder[_Line] = GrowingOrder(lambda line: line.ages_at)
        self._keys: dict[Sequence, _Key] = {}
        self._expiring: GrowingOrder[Sequence] = GrowingOrder(lambda seq: seq.request.expires_at or 0.0)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._keys))

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._keys

    def add(self, seq: Sequence) -> None:
        request = seq.request
        tenant = self._tenants[request.tenant]
        where = (request.tenant, request.service_class)
        line = self._lines.get(where)
        if line is None:
            line = self._lines[where] = _Line(tenant, request.service_class, next(self._numbers))
        output = tenant.expected_output(seq.num_prompt_tokens, seq.params)
        expected = seq.num_prompt_tokens + OUTPUT_WEIGHT * output
        # What has begun continues first: its blocks are still cached.
        key = (request.priority, 0 if seq.preemptions else 1, request.arrival * AGING_TOKENS + expected, seq.number)
        self._keys[seq] = key
        insort(line.requests, (key, seq), key=lambda entry: entry[0])
        line.num_short += not self._is_long(seq)
        self._changed.add(line)
        if request.expires_at is not None and seq.group.prompt_usage is None:
            self._expiring.add(seq, seq.number)
        self._tenants.count(tenant, waiting=1)

    def remove(self, seq: Sequence) -> None:
        key = self._keys.pop(seq)
        where = (seq.request.tenant, seq.request.service_class)
        line = self._lines[where]
        del line.requests[bisect_left(line.requests, key, key=lambda entry: entry[0])]
        line.num_short -= not self._is_long(seq)
        self._changed.add(line)
        self._expiring.discard(seq)
        self._tenants.count(line.tenant, waiting=-1)
        if not line.requests:
            del self._lines[where]
            self._changed.discard(line)
            self._aging.discard(line)
            if line.order is not None:
                line.order.discard(line)

    def candidates(self, now: float, batch: bool) -> Candidates:
        """Return a walk over the waiting requests, best first: the batch class only, or all others."""
        return Candidates(self, now, batch)

    def heads(self, now: float, rank: int, count: int) -> list[tuple[TenantShare, ServiceClass]]:
        """Return the tenant and class of the first lines that count as class `rank`, best first, at most `count`."""
        self.update(now)
        orders = self._orders[rank]
        lines = orders.mixed.first(count) + orders.long.first(count)
        lines.sort(key=lambda line: (line.tenant.served, line.number))
        return [(line.tenant, line.service_class) for line in lines[:count]]

    def first(self, tenant: str, service_class: ServiceClass, rank: int) -> Sequence | None:
        """Return the request of that line to be served next, if there is one."""
        line = self._lines.get((tenant, service_class))
        return None if line is None else self.first_of(line, rank, set())

    def expired(self, now: float) -> list[Sequence]:
        """Return the requests that nobody waits for any more, and that have not begun. Each is returned once."""
        expired = []
        while (seq := self._expiring.at(0)) is not None and (seq.request.expires_at or 0.0) <= now:
            self._expiring.discard(seq)
            if seq.group.prompt_usage is None:  # else it has begun: then it never expires
                expired.append(seq)
        return expired

    def update(self, now: float) -> None:
        """Put each line in its place that has changed or grown older by a class."""
        for line in self._changed:
            self._place(line, now)
        self._changed.clear()
        while (aged := self._aging.at(0)) is not None and aged.ages_at <= now:
            self._place(aged, now)

    def _place(self, line: _Line, now: float) -> None:
        order = self._orders[line.rank(now)].of(line)
        if line.order is not order:
            if line.order is not None:
                line.order.discard(line)
            order.add(line, line.number)
            line.order = order
        self._aging.discard(line)
        line.ages_at = line.next_change(now)
        if line.ages_at < math.inf:
            self._aging.add(line, line.number)

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
            if line.num_short != sum(not self._is_long(seq) for _, seq in line.requests):
                raise RuntimeError("queue integrity: a line's long prompts are miscounted")
        placed = [line for orders in self._orders.values() for order in (orders.mixed, orders.long) for line in order]
        if len(placed) != len(set(placed)) or set(placed) | self._changed != set(self._lines.values()):
            raise RuntimeError("queue integrity: a line has no place, or two")

    def first_of(self, line: _Line, rank: int, passed: set[Sequence]) -> Sequence:
        """Return the line's next: of the first few of equal priority the one that finds most of its tokens cached."""
        window: list[tuple[_Key, Sequence]] = []
        for key, seq in line.requests:
            if seq not in passed:
                if window and key[:2] != window[0][0][:2]:
                    break
                seq.rank = rank  # what it finds cached depends on it
                window.append((key, seq))
                if len(window) == GROUPING_WINDOW:
                    break
        if len(window) == 1:
            return window[0][1]
        return min(window, key=lambda entry: (entry[0][2] - self._num_cached(entry[1]), entry[0][3]))[1]


class Candidates:
    """A walk over waiting requests, best first.

    The request returned last may be removed from the queue before the next one is requested, and any tenant's counter
    may grow. Nothing may be added.
    """

    def __init__(self, queue: WaitingQueue, now: float, batch: bool) -> None:
        self._queue = queue
        self._now = now
        self._ranks = [int(rank) for rank in ServiceClass if (rank is ServiceClass.BATCH) == batch]
        self._passed: dict[_Line, set[Sequence]] = {}
        self._indexes: dict[GrowingOrder[_Line], int] = {}  # of each order's first line that is not exhausted
        self._last: tuple[_Line, Sequence] | None = None

    def next(self, *, skip_long: bool = False) -> Sequence | None:
        """Return the next request, None after the last.

        With `skip_long`, lines of long prompts only are left out. A long prompt may still be returned from others.
        """
        if self._last is not None:
            line, seq = self._last
            if seq in self._queue:
                self._passed.setdefault(line, set()).add(seq)
            else:
                self._indexes.clear()  # its line, its tenant's counter: any line may be the best now
        self._queue.update(self._now)
        for rank in self._ranks:
            found = self._best_line(rank, skip_long)
            if found is not None:
                seq = self._queue.first_of(found, rank, self._passed.get(found, set()))
                self._last = (found, seq)
                return seq
        return None

    def _best_line(self, rank: int, skip_long: bool) -> _Line | None:
        orders = self._queue._orders[rank]
        mixed = self._first_open(orders.mixed)
        long = None if skip_long else self._first_open(orders.long)
        found = [line for line in (mixed, long) if line is not None]
        return min(found, key=lambda line: (line.tenant.served, line.number), default=None)

    def _first_open(self, order: GrowingOrder[_Line]) -> _Line | None:
        """Return the first line of which not all requests that may be looked at have been passed."""
        index = self._indexes.get(order, 0)
        while (line := order.at(index)) is not None:
            if len(self._passed.get(line, ())) < min(len(line.requests), MAX_SKIPPED_REQUESTS):
                break
            index += 1
        self._indexes[order] = index
        return line
