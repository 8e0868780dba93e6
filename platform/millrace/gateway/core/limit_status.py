"""The state of rate limits at an admission, as responses and the request log report it."""

from __future__ import annotations

import msgspec

from tenants.keys.snapshot import LimitSetSnapshot


class LimitCheck(msgspec.Struct, frozen=True):
    """One rate limit that applies to a request, and what the request takes of it."""

    key: str  # in Valkey
    group: int  # ENFORCED, or the number of a dry-run set
    check_type: int
    limit: int
    cost: int
    period: tuple[int, int]
    set: LimitSetSnapshot
    name: str
    counts: str  # what is counted: requests, input, output or total; other limits repeat their name


class LimitStatus(msgspec.Struct, frozen=True):
    """The state of one rate limit at an admission."""

    check: LimitCheck
    wait_ms: int  # until the request would fit; 0: it fits now, -1: never
    level: int

    @property
    def remaining(self) -> int:
        ticks = self.check.period[0]
        return max(0, self.check.limit * ticks - self.level) // ticks

    @property
    def share(self) -> float:
        """Return the unused share of the limit, from 0 to 1."""
        full = self.check.limit * self.check.period[0]
        return max(0, full - self.level) / full if full else 0.0

    @property
    def reset_ms(self) -> int:
        """Return the milliseconds until the bucket is empty, which is when the full limit is available."""
        return -(-self.level // self.check.limit) * self.check.period[1] if self.check.limit else 0
