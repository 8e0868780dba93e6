"""Token buckets of rate limits in Valkey, for gateways, which count, and the console, which reads. No Django.

The buckets of a limit set are one string: a level and a tick for each of `WINDOWS`, as doubles. A level is the used
amount times the ticks of the period. Each tick reduces the level by the limit. Both numbers are 0 if the limit was
never used. See millrace.gateway.admission.limits.
"""

from __future__ import annotations

import struct

MINUTE, DAY = (60_000, 1), (86_400, 1_000)  # ticks in the period, milliseconds in a tick
# The limit's name, what it counts, and its period, in the stored order. NOTE: change `buckets_key` with this tuple.
WINDOWS = (
    ("requests_per_minute", "requests", MINUTE),
    ("input_tokens_per_minute", "input", MINUTE),
    ("output_tokens_per_minute", "output", MINUTE),
    ("tokens_per_minute", "total", MINUTE),
    ("requests_per_day", "requests", DAY),
    ("input_tokens_per_day", "input", DAY),
    ("output_tokens_per_day", "output", DAY),
    ("tokens_per_day", "total", DAY),
)
WINDOW_INDEXES = {name: index for index, (name, _, _) in enumerate(WINDOWS)}
STATE = struct.Struct(f"<{2 * len(WINDOWS)}d")


def start_of(tenant_id: int, set_id: int) -> str:
    """Return the prefix of the keys of a set's buckets and concurrency slots."""
    return f"millrace:limit_state:{{{tenant_id}}}:{set_id}:"


def buckets_key(tenant_id: int, set_id: int) -> str:
    """Return the key of a set's buckets."""
    return start_of(tenant_id, set_id) + "b"


def bucket(stored: bytes | None, name: str) -> tuple[int, int]:
    """Return the level and the tick of the limit's bucket. `stored` is the string of the set, None if it has none."""
    if stored is None:
        return (0, 0)
    numbers, at = STATE.unpack(stored), 2 * WINDOW_INDEXES[name]
    return (int(numbers[at]), int(numbers[at + 1]))


def compute_remaining(stored: bytes | None, name: str, limit: int, now_ms: int) -> int:
    """Return the amount that is left of a limit at a time. `stored` is the string of the limit's set."""
    ticks, tick = WINDOWS[WINDOW_INDEXES[name]][2]
    level, since = bucket(stored, name)
    used = max(0, min(level, limit * ticks) - max(0, now_ms // tick - since) * limit)
    return (limit * ticks - used) // ticks
