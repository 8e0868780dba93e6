"""Retry budgets: the share of a policy's requests that may fall back, counted in each gateway."""

from __future__ import annotations

import math
import time
from collections import OrderedDict

WINDOW_SECONDS = 10.0  # after it, a count has decayed to a third
MIN_FALLBACKS = 3.0  # always allowed within a window, so that a policy with few requests can fall back
MAX_POLICIES = 10_000  # the least recently used are forgotten


class RetryBudgets:
    """The decayed numbers of requests and fallbacks of each policy."""

    def __init__(self) -> None:
        # (tenant, policy name) -> (requests, fallbacks, monotonic time).
        self._counts: OrderedDict[tuple[int, str], tuple[float, float, float]] = OrderedDict()

    def record_request(self, policy: tuple[int, str], now: float | None = None) -> None:
        self._add(policy, 1, 0, now)

    def take(self, policy: tuple[int, str], max_percent: int | None, now: float | None = None) -> bool:
        """Count a fallback if the budget allows it. Return whether it does."""
        if max_percent is not None:
            requests, fallbacks = self._add(policy, 0, 0, now)
            minimum = MIN_FALLBACKS if max_percent else 0.0
            if fallbacks + 1 > max(minimum, requests * max_percent / 100):
                return False
        self._add(policy, 0, 1, now)
        return True

    def _add(self, policy: tuple[int, str], requests: int, fallbacks: int, now: float | None) -> tuple[float, float]:
        now = time.monotonic() if now is None else now
        old_requests, old_fallbacks, at = self._counts.get(policy, (0.0, 0.0, now))
        factor = math.exp(-max(0.0, now - at) / WINDOW_SECONDS)
        counts = old_requests * factor + requests, old_fallbacks * factor + fallbacks
        self._counts[policy] = (*counts, now)
        self._counts.move_to_end(policy)
        if len(self._counts) > MAX_POLICIES:
            self._counts.popitem(last=False)
        return counts
