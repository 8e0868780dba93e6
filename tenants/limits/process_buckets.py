"""Token buckets in the memory of a process, for limits per minute that each process enforces. No Django."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

MAX_NAMES = 10_000  # if exceeded, the least recently used bucket is dropped, so it is full again


class ProcessBuckets:
    """The buckets of a process by name. It is thread-safe."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (tokens, time)
        self._lock = threading.Lock()

    def take(self, name: str, tokens: float = 1.0) -> bool:
        """Take tokens. Returns False if there are too few."""
        return self._change(name, -min(tokens, self._per_minute))

    def release(self, name: str, tokens: float = 1.0) -> None:
        """Return tokens that were taken."""
        self._change(name, min(tokens, self._per_minute))

    def retry_after(self, name: str, tokens: float = 1.0) -> float:
        """Return the seconds until the bucket has this number of tokens."""
        with self._lock:
            available, _ = self._read(name)
        return max(0.0, (min(tokens, self._per_minute) - available) * 60 / self._per_minute)

    def _change(self, name: str, amount: float) -> bool:
        with self._lock:
            tokens, now = self._read(name)
            if tokens + amount < 0:
                return False
            self._buckets[name] = (min(tokens + amount, float(self._per_minute)), now)
            self._buckets.move_to_end(name)
            if len(self._buckets) > MAX_NAMES:
                self._buckets.popitem(last=False)
        return True

    def _read(self, name: str) -> tuple[float, float]:
        """Return the current tokens of a bucket, and the time."""
        now = time.monotonic()
        tokens, at = self._buckets.get(name, (float(self._per_minute), now))
        return min(float(self._per_minute), tokens + (now - at) * self._per_minute / 60), now
