"""Who goes next: one queue a model, fair between tenants in proportion to their weights.

Start-time fair queueing. Each tenant has a clock, which a request moves on by its tokens over the tenant's weight; next
comes the tenant whose clock is least. One that was idle starts at the present, so that nobody saves up a turn. What a
request reserved and did not use is given back to its clock. Long jobs wait in a lane of their own beside the tenant's
others, fair in the same way, so that a long prompt holds up no short one; among the tenants the two count as one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """The tenant has as many requests waiting as it may."""


@dataclass
class _Lane(Generic[T]):
    clock: float = 0.0
    waiting: deque[tuple[T, int]] = field(default_factory=deque)  # with their costs


@dataclass
class _Tenant(Generic[T]):
    weight: float
    clock: float = 0.0
    short: _Lane[T] = field(default_factory=_Lane)
    long: _Lane[T] = field(default_factory=_Lane)

    def __len__(self) -> int:
        return len(self.short.waiting) + len(self.long.waiting)

    def next_lane(self) -> _Lane[T]:
        lanes = [lane for lane in (self.short, self.long) if lane.waiting]
        return min(lanes, key=lambda lane: lane.clock)

    def lane(self, long: bool) -> _Lane[T]:
        return self.long if long else self.short


class FairQueue(Generic[T]):
    """Requests that wait for one model. Costs are tokens."""

    def __init__(self, most_per_tenant: int) -> None:
        self._most = most_per_tenant
        self._tenants: dict[int, _Tenant[T]] = {}
        self._now = 0.0  # the clock of whoever went last
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def waiting(self, tenant: int) -> int:
        return len(self._tenants[tenant]) if tenant in self._tenants else 0

    def share(self, tenant: int, weight: float) -> float:
        """The part of the service that the tenant gets as things stand, from 0 to 1."""
        others = sum(each.weight for name, each in self._tenants.items() if len(each) and name != tenant)
        return weight / (weight + others)

    def full(self, tenant: int) -> bool:
        return self.waiting(tenant) >= self._most

    def put(self, tenant: int, weight: float, cost: int, item: T, *, long: bool = False) -> None:
        """Wait for a turn.

        Raises:
            QueueFull: the tenant's queue is.
        """
        if self.full(tenant):
            raise QueueFull
        entry = self._tenants.setdefault(tenant, _Tenant(weight))
        entry.weight = weight
        if not len(entry):
            entry.clock = max(entry.clock, self._now)
        lane, other = entry.lane(long), entry.lane(not long)
        if not lane.waiting:
            lane.clock = max(lane.clock, other.clock if other.waiting else 0.0)
        lane.waiting.append((item, cost))
        self._size += 1

    def put_back(self, tenant: int, weight: float, item: T) -> None:
        """Go first again: it had its turn, and whoever was to serve it is gone. Never refused."""
        entry = self._tenants.setdefault(tenant, _Tenant(weight, clock=self._now))
        lane = entry.short
        lane.waiting.appendleft((item, 0))
        self._size += 1

    def peek(self) -> T | None:
        """Who goes next."""
        entry = self._next()
        return None if entry is None else entry.next_lane().waiting[0][0]

    def pop(self) -> T | None:
        """Let the next one go."""
        entry = self._next()
        if entry is None:
            return None
        lane = entry.next_lane()
        item, cost = lane.waiting.popleft()
        self._size -= 1
        self._now = max(self._now, entry.clock)
        entry.clock += cost / entry.weight
        lane.clock += cost
        return item

    def refund(self, tenant: int, cost: int) -> None:
        """So much of what a request went with, it did not use."""
        entry = self._tenants.get(tenant)
        if entry is not None:
            entry.clock -= cost / entry.weight

    def remove(self, tenant: int, item: T) -> bool:
        """It no longer waits. False if it did not."""
        entry = self._tenants.get(tenant)
        for lane in (entry.short, entry.long) if entry is not None else ():
            for place, (waiting, _) in enumerate(lane.waiting):
                if waiting == item:
                    del lane.waiting[place]
                    self._size -= 1
                    return True
        return False

    def forget_idle(self) -> None:
        """Drop tenants who have nothing waiting and nothing behind them."""
        for tenant, entry in list(self._tenants.items()):
            if not len(entry) and entry.clock <= self._now:
                del self._tenants[tenant]

    def _next(self) -> _Tenant[T] | None:
        busy = [entry for entry in self._tenants.values() if len(entry)]
        return min(busy, key=lambda entry: entry.clock, default=None)
