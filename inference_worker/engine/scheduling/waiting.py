"""The waiting requests and their order. Does not import torch.

The order is: class, the tenant's virtual counter, the tenant's priority, shortest expected first, arrival. The
advantage of short requests is bounded: a request is ordered after requests that arrived up to `expected tokens /
AGING_TOKENS` seconds later, so every request is served eventually.

Locality: of the lines whose tenants' counters are at most `locality_tokens` above the lowest one, the line whose next
request has the most cached tokens goes first. So requests of a tenant with a common prefix run while the prefix is
cached, as in deficit longest prefix match (Cao et al., 2025). A tenant is never served while its counter is more than
`locality_tokens` above that of a waiting tenant of the same class, so the difference of service grows by at most that.

The requests of one tenant and class form a line. Lines are sorted, so the cost of a step does not depend on their
number.
A line is moved only if its first request changes, its tenant's counter increases, or its age passes a multiple of
CLASS_SECONDS.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping

from inference_worker.contract.request import ServiceClass
from inference_worker.engine.scheduling.fairness import OUTPUT_WEIGHT, FairShareTable, TenantShare
from inference_worker.engine.scheduling.ordered import GrowingOrder
from inference_worker.engine.sequences.sequence import Sequence

AGING_TOKENS = 2000.0  # expected tokens that weigh as much as a second of waiting
CLASS_SECONDS = 20.0  # waiting time after which an interactive request moves up by one class
GROUPING_WINDOW = 8  # first requests of a tenant, of which the one with most cached tokens is served first
LOCALITY_LINES = 8  # lines that are compared by their cached tokens
MAX_SKIPPED_REQUESTS = 64  # requests of a line that may be skipped in a step because they cannot start yet

_Key = tuple[int, int, float, int]


class _Line:
    """The waiting requests of one tenant and class."""

    def __init__(self, tenant: TenantShare, service_class: ServiceClass, number: int) -> None:
        self.tenant = tenant
        self.service_class = service_class
        self.number = number  # order among lines whose tenants have the same counter
        self.requests: list[tuple[_Key, Sequence]] = []
        self.num_short = 0  # requests whose prompts are not long
        self.order: GrowingOrder[_Line] | None = None  # the order that contains the line
        self.ages_at = math.inf  # time of the next update of the effective class

    def rank(self, now: float) -> int:
        """Return the effective class of the line's first request. Interactive classes improve with age, the batch class
        does not."""
        if self.service_class is ServiceClass.BATCH:
            return ServiceClass.BATCH
        return max(0, self.service_class - self._periods(now))

    def next_change(self, now: float) -> float:
        """Return the time after `now` when the line's rank may change by age."""
        if self.service_class is ServiceClass.BATCH or self.rank(now) == 0:
            return math.inf
        boundary = self.requests[0][1].waiting_since + (self._periods(now) + 1) * CLASS_SECONDS
        # Earlier by more than rounding errors, so that a step never uses an old rank.
        return max(boundary - 1e-6, math.nextafter(now, math.inf))

    def _periods(self, now: float) -> int:
        return int((now - self.requests[0][1].waiting_since) / CLASS_SECONDS)


class _Orders:
    """The lines with the same effective class, ordered by their tenants' counters."""

    def __init__(self) -> None:
        self.mixed: GrowingOrder[_Line] = GrowingOrder(lambda line: line.tenant.served)
        self.long: GrowingOrder[_Line] = GrowingOrder(lambda line: line.tenant.served)  # lines of long prompts only

    def of(self, line: _Line) -> GrowingOrder[_Line]:
        return self.mixed if line.num_short else self.long


class WaitingQueue:
    """All waiting requests.

    Args:
        tenants: the tenants' accounts.
        num_cached: returns the number of a request's tokens that are cached.
        is_long: returns whether a request's prompt counts toward the limit of long prefills.
        locality_tokens: the advantage in the counter that cached tokens can outweigh; 0: cached tokens do not count.
    """

    def __init__(
        self,
        tenants: FairShareTable,
        num_cached: Callable[[Sequence], int],
        is_long: Callable[[Sequence], bool] = lambda _: False,
        locality_tokens: int = 0,
    ) -> None:
        self._tenants = tenants
        self._num_cached = num_cached
        self._is_long = is_long
        self._locality_tokens = locality_tokens
        self._lines: dict[tuple[str, ServiceClass], _Line] = {}
        self._numbers = itertools.count()
        self._orders = {int(rank): _Orders() for rank in ServiceClass}
        self._changed: set[_Line] = set()  # lines to reorder before the next choice
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
        # Requests that were started before go first: their blocks may still be cached.
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
        """Return an iteration over waiting requests, best first: of the batch class, or of all others."""
        return Candidates(self, now, batch)

    def heads(self, now: float, rank: int, count: int) -> list[tuple[TenantShare, ServiceClass]]:
        """Return tenant and class of the first lines with effective class `rank`, best first, at most `count`."""
        self.update(now)
        orders = self._orders[rank]
        lines = orders.mixed.list_first(count) + orders.long.list_first(count)
        lines.sort(key=lambda line: (line.tenant.served, line.number))
        return [(line.tenant, line.service_class) for line in lines[:count]]

    def find_next(self, tenant: str, service_class: ServiceClass, rank: int) -> Sequence | None:
        """Return the next request of this line, if there is one."""
        line = self._lines.get((tenant, service_class))
        return None if line is None else self.first_of(line, rank, set())

    def pop_expired(self, now: float) -> list[Sequence]:
        """Return the expired requests that have not started. Each one is returned once."""
        expired = []
        while (seq := self._expiring.at(0)) is not None and (seq.request.expires_at or 0.0) <= now:
            self._expiring.discard(seq)
            if seq.group.prompt_usage is None:  # a started request does not expire
                expired.append(seq)
        return expired

    def update(self, now: float) -> None:
        """Move lines that have changed, or whose effective class has changed, to their places."""
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
            RuntimeError: a request is missing, duplicated or out of order.
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

    def by_locality(self, lines: Iterable[_Line], rank: int, passed: Mapping[_Line, set[Sequence]]) -> _Line:
        """Return the line whose next request has the most cached tokens, among lines in the order of their counters."""
        best, most = None, -1
        for line in lines:
            cached = self._num_cached(self.first_of(line, rank, passed.get(line, set())))
            if cached > most:
                best, most = line, cached
        if best is None:
            raise ValueError("there is no line")
        return best

    @property
    def locality_tokens(self) -> int:
        return self._locality_tokens

    def first_of(self, line: _Line, rank: int, passed: set[Sequence]) -> Sequence:
        """Return the line's next request: among its first requests of equal priority, the one with most cached
        tokens."""
        window: list[tuple[_Key, Sequence]] = []
        for key, seq in line.requests:
            if seq not in passed:
                if window and key[:2] != window[0][0][:2]:
                    break
                seq.rank = rank  # num_cached depends on it
                window.append((key, seq))
                if len(window) == GROUPING_WINDOW:
                    break
        if len(window) == 1:
            return window[0][1]
        return min(window, key=lambda entry: (entry[0][2] - self._num_cached(entry[1]), entry[0][3]))[1]


class Candidates:
    """An iteration over waiting requests, best first.

    The request that was returned last may be removed from the queue before the next call of `next`, and counters of
    tenants may increase. Requests must not be added.
    """

    def __init__(self, queue: WaitingQueue, now: float, batch: bool) -> None:
        self._queue = queue
        self._now = now
        self._ranks = [int(rank) for rank in ServiceClass if (rank is ServiceClass.BATCH) == batch]
        self._passed: dict[_Line, set[Sequence]] = {}
        self._indexes: dict[GrowingOrder[_Line], int] = {}  # place of each order's first line that is not exhausted
        self._last: tuple[_Line, Sequence] | None = None

    def next(self, *, skip_long: bool = False) -> Sequence | None:
        """Return the next request, or None after the last one.

        With `skip_long`, lines that have only long prompts are skipped. Long prompts of other lines may still be
        returned.
        """
        if self._last is not None:
            line, seq = self._last
            if seq in self._queue:
                self._passed.setdefault(line, set()).add(seq)
            else:
                self._indexes.clear()  # the request's removal or a counter may have changed the order
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
        least = min(found, key=_by_counter, default=None)
        if least is None or not self._queue.locality_tokens:
            return least
        most = least.tenant.served + self._queue.locality_tokens
        near = [
            line for order in (orders.mixed, *(() if skip_long else (orders.long,))) for line in self._open(order, most)
        ]
        return self._queue.by_locality(sorted(near, key=_by_counter)[:LOCALITY_LINES], rank, self._passed)

    def _open(self, order: GrowingOrder[_Line], most: float) -> Iterator[_Line]:
        """Return the first lines that have requests to return, and whose tenants' counters are at most `most`."""
        index, count = self._indexes.get(order, 0), 0
        while count < LOCALITY_LINES and (line := order.at(index)) is not None and line.tenant.served <= most:
            if self._has_more(line):
                count += 1
                yield line
            index += 1

    def _has_more(self, line: _Line) -> bool:
        return len(self._passed.get(line, ())) < min(len(line.requests), MAX_SKIPPED_REQUESTS)

    def _first_open(self, order: GrowingOrder[_Line]) -> _Line | None:
        """Return the first line that has requests which were neither returned nor skipped."""
        index = self._indexes.get(order, 0)
        while (line := order.at(index)) is not None:
            if self._has_more(line):
                break
            index += 1
        self._indexes[order] = index
        return line


def _by_counter(line: _Line) -> tuple[float, int]:
    return line.tenant.served, line.number
