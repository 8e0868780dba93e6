"""Values that are computed once for all viewers of a page."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedValue(Generic[T]):
    """A value that each process computes at most once in a period. Requests that need it meanwhile wait for it.

    It must be the same for all users who see it: it does not depend on the tenant of the request.
    """

    def __init__(self, period: timedelta, find: Callable[[datetime], T]) -> None:
        self._period, self._find = period, find
        self._lock = Lock()
        self._found: tuple[datetime, T] | None = None

    def get(self, now: datetime) -> T:
        """Return the value of `now`, or one that was computed less than the period before."""
        with self._lock:
            if self._found is None or not self._found[0] <= now < self._found[0] + self._period:
                self._found = now, self._find(now)
            return self._found[1]
