"""The state of rate limits at an admission, as responses and the request log report it."""

from __future__ import annotations

from dataclasses import dataclass

from tenants.keys.snapshot import LimitSetSnapshot


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """One limit a request must keep."""

    key: str  # in the broker
    group: int  # ENFORCED, or a dry-run set's own
    kind: int
    limit: int
    cost: int
    period: tuple[int, int]
    set: LimitSetSnapshot
    name: str  # of the limit
    counts: str  # requests, input, output, total; concurrency and the rest are themselves


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """How one limit stood at an admission."""

    check: LimitCheck
    wait_ms: int  # until the request would fit; 0: it does, -1: never
    level: int

    @property
    def remaining(self) -> int:
        ticks = self.check.period[0]
        return max(0, self.check.limit * ticks - self.level) // ticks

    @property
    def share(self) -> float:
        """What is left, from 0 to 1."""
        full = self.check.limit * self.check.period[0]
        return max(0, full - self.level) / full if full else 0.0

    @property
    def reset_ms(self) -> int:
        """Until the bucket is as good as new."""
        return -(-self.level // self.check.limit) * self.check.period[1] if self.check.limit else 0
