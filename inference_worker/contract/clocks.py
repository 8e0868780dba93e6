"""The check of this host's clock against Valkey's. Deadlines of requests are compared with the clocks of two hosts."""

from __future__ import annotations

import time
from typing import Any

import redis

MAX_CLOCK_SECONDS = 5.0


def check_clock(broker: redis.Redis) -> None:
    """Check that this host's clock and Valkey's differ by less than MAX_CLOCK_SECONDS.

    Raises:
        SystemExit: they differ by more.
        redis.RedisError: Valkey cannot be reached.
    """
    broker.ping()  # so that the next command does not include the connection
    before = time.time()
    reply: Any = broker.time()
    after = time.time()
    ahead = (before + after) / 2 - (reply[0] + reply[1] / 1e6)
    if abs(ahead) - (after - before) / 2 > MAX_CLOCK_SECONDS:
        direction = "ahead of" if ahead > 0 else "behind"
        raise SystemExit(
            f"MILLRACE_VALKEY_URL: this host's clock is {abs(ahead):.1f} s {direction} the clock of Valkey's host,"
            f" which may differ by {MAX_CLOCK_SECONDS:g} s; synchronize both clocks (NTP) and start the worker again"
        )
