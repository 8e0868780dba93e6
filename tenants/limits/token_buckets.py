"""Token buckets of rate limits in Valkey, for gateways, which count, and the console, which reads. No Django.

A bucket is a string of its level and a tick. The level is the used amount times the ticks of the period. Each tick
reduces the level by the limit. See millrace.gateway.admission.limits.
"""

from __future__ import annotations

MINUTE, DAY = (60_000, 1), (86_400, 1_000)  # ticks in the period, milliseconds in a tick
# The limit's name, what it counts, its period, and its bucket's short name.
WINDOWS = (
    ("requests_per_minute", "requests", MINUTE, "rm"),
    ("input_tokens_per_minute", "input", MINUTE, "im"),
    ("output_tokens_per_minute", "output", MINUTE, "om"),
    ("tokens_per_minute", "total", MINUTE, "tm"),
    ("requests_per_day", "requests", DAY, "rd"),
    ("input_tokens_per_day", "input", DAY, "id"),
    ("output_tokens_per_day", "output", DAY, "od"),
    ("tokens_per_day", "total", DAY, "td"),
)


def start_of(tenant_id: int, set_id: int) -> str:
    """Return the prefix of the names of a set's buckets and concurrency slots."""
    return f"millrace:limit_state:{{{tenant_id}}}:{set_id}:"


def remaining(stored: bytes | None, limit: int, period: tuple[int, int], now_ms: int) -> int:
    """Return the amount that is left in a bucket at a time. `stored` is the bucket's string, None if it is full."""
    if stored is None:
        return limit
    ticks, tick = period
    level, since = map(int, stored.split())
    drained = max(0, min(level, limit * ticks) - max(0, now_ms // tick - since) * limit)
    return (limit * ticks - drained) // ticks
