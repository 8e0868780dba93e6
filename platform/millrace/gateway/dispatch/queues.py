"""A queue per model that is fair between tenants in proportion to their weights.

This is start-time fair queueing. Each tenant has a clock, which a request advances by its tokens divided by the
tenant's weight. The tenant with the lowest clock is next. A tenant that was idle starts at the current time, so unused
turns are not saved. Reserved tokens that a request did not use are subtracted from the clock again. Long prompts wait
in a separate lane of the tenant, fair in the same way, so that they do not delay short ones.

A caller may also serve another tenant whose clock is at most `ahead` above the lowest (`candidates`), for example since
the prefix of its request is cached. This adds `ahead` to the bound of the difference between the clocks of two waiting
tenants (docs/explanation/scheduling.md).

Tenants with waiting requests are kept sorted by their clocks, so the cost of an event does not depend on their number.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from inference_worker.engine.scheduling.ordered import GrowingOrder

T = TypeVar("T")


class QueueFull(Exception):
    """The tenant has reached its maximum number of waiting requests."""


@dataclass
class _Lane(Generic[T]):
    clock: float = 0.0
    waiting: deque[tuple[T, int]] = field(default_factory=deque)  # (item, cost)


@dataclass(eq=False)
class _Tenant(Generic[T]):
    number: int  # order of tenants with equal clocks
    weight: float
    clock: float = 0.0
    short: _Lane[T] = field(default_factory=_Lane)
    long: _Lane[T] = field(default_factory=_Lane)

    def __len__(self) -> int:
        return len(self.short.waiting) + len(self.long.waiting)

    def next_lane(self) -> _Lane[T]:
        if not (self.short.waiting and self.long.waiting):
            return self.short if self.short.waiting else self.long
        return self.long if self.long.clock < self.short.clock else self.short

    def lane(self, long: bool) -> _Lane[T]:
        return self.long if long else self.short


class FairQueue(Generic[T]):
    """The requests that wait for one model. Costs are numbers of tokens."""

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        self._tenants: dict[int, _Tenant[T]] = {}
        self._busy: GrowingOrder[_Tenant[T]] = GrowingOrder(lambda entry: entry.clock)  # tenants with waiting requests
        # Weight -> number of tenants in `_busy`. A sum of weights would drift with each change.
        self._busy_weights: Counter[float] = Counter()
        self._numbers = itertools.count()
        self._now = 0.0  # the lowest clock of a waiting tenant when an item was last removed
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def count_waiting(self, tenant: int) -> int:
        return len(self._tenants[tenant]) if tenant in self._tenants else 0

    def share(self, tenant: int, weight: float) -> float:
        """Return the part of the service that the tenant currently gets, from 0 to 1."""
        entry = self._tenants.get(tenant)
        weights = self._busy_weights.copy()
        if entry is not None and entry in self._busy:
            weights[entry.weight] -= 1
        return weight / (weight + sum(other * count for other, count in weights.items()))

    def is_full(self, tenant: int) -> bool:
        return self.count_waiting(tenant) >= self._max_per_tenant

    def put(self, tenant: int, weight: float, cost: int, item: T, *, long: bool = False) -> None:
        """Add an item to the tenant's queue.

        Raises:
            QueueFull: the tenant's queue is full.
        """
        if self.is_full(tenant):
            raise QueueFull
        entry = self._entry(tenant, weight, 0.0)
        self._leave_order(entry)
        entry.weight = weight
        if not len(entry):
            entry.clock = max(entry.clock, self._now)
        lane, other = entry.lane(long), entry.lane(not long)
        if not lane.waiting:
            lane.clock = max(lane.clock, other.clock if other.waiting else 0.0)
        lane.waiting.append((item, cost))
        self._size += 1
        self._join_order(entry)

    def requeue(self, tenant: int, weight: float, item: T) -> None:
        """Add an item at the head of the tenant's queue, for example after its replica was lost. Never full."""
        entry = self._entry(tenant, weight, self._now)
        self._leave_order(entry)
        entry.short.waiting.appendleft((item, 0))
        self._size += 1
        self._join_order(entry)

    def peek(self) -> T | None:
        """Return the next item without removing it."""
        entry = self._busy.at(0)
        return None if entry is None else entry.next_lane().waiting[0][0]

    def candidates(self, ahead: float, most: int) -> list[T]:
        """Return the next items of the tenants whose clocks are at most `ahead` above the lowest, lowest first."""
        found: list[T] = []
        lowest = self._busy.at(0)
        while lowest is not None and len(found) < most:
            entry = self._busy.at(len(found))
            if entry is None or entry.clock > lowest.clock + ahead:
                break
            found.append(entry.next_lane().waiting[0][0])
        return found

    def pop(self, place: int = 0) -> T | None:
        """Remove and return the next item of the tenant at this place among the candidates."""
        lowest, entry = self._busy.at(0), self._busy.at(place)
        if lowest is None or entry is None:
            return None
        self._now = max(self._now, lowest.clock)
        self._leave_order(entry)
        lane = entry.next_lane()
        item, cost = lane.waiting.popleft()
        self._size -= 1
        entry.clock += cost / entry.weight
        lane.clock += cost
        self._join_order(entry)
        return item

    def refund(self, tenant: int, cost: int) -> None:
        """Subtract tokens that a request reserved and did not use from the tenant's clock."""
        entry = self._tenants.get(tenant)
        if entry is not None:
            self._leave_order(entry)
            entry.clock -= cost / entry.weight
            self._join_order(entry)

    def remove(self, tenant: int, item: T) -> bool:
        """Remove the item. Return False if it was not waiting."""
        entry = self._tenants.get(tenant)
        if entry is None:
            return False
        for lane in (entry.short, entry.long):
            for index, (waiting, _) in enumerate(lane.waiting):
                if waiting == item:
                    self._leave_order(entry)
                    del lane.waiting[index]
                    self._size -= 1
                    self._join_order(entry)
                    return True
        return False

    def forget_idle(self) -> None:
        """Remove tenants that have no waiting requests and whose clock is not ahead."""
        for tenant, entry in list(self._tenants.items()):
            if not len(entry) and entry.clock <= self._now:
                del self._tenants[tenant]

    def _entry(self, tenant: int, weight: float, clock: float) -> _Tenant[T]:
        entry = self._tenants.get(tenant)
        if entry is None:
            entry = self._tenants[tenant] = _Tenant(next(self._numbers), weight, clock)
        return entry

    def _leave_order(self, entry: _Tenant[T]) -> None:
        """Remove the tenant from the order, before its clock, its weight or its queue changes."""
        if entry in self._busy:
            self._busy.discard(entry)
            self._busy_weights[entry.weight] -= 1
            if not self._busy_weights[entry.weight]:
                del self._busy_weights[entry.weight]

    def _join_order(self, entry: _Tenant[T]) -> None:
        """Add the tenant to the order again, if it has waiting requests."""
        if len(entry):
            self._busy.add(entry, entry.number)
            self._busy_weights[entry.weight] += 1
