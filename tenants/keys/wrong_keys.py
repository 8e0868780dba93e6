"""A limit of wrong API keys per client IP address. Does not import Django.

An address has a token bucket of MILLRACE_WRONG_KEYS_PER_MINUTE. A wrong key takes a token, a valid one takes none.
Without a token, a key is still looked up, so a valid key from the same address always passes. The lookup is then
paced (see `millrace.gateway.auth.authentication`), and a wrong key gets a 429 instead of a 401.

The gateway and the management API of one process share the buckets. Other processes have their own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

import structlog

from tenants.keys.ip_allowlist import client_network

log = structlog.get_logger(__name__)

MAX_ADDRESSES = 10_000  # if exceeded, the least recently used bucket is dropped, so it is full again
LOG_SECONDS = 10.0


class WrongKeyThrottle:
    """The token buckets of a process. It is thread-safe."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> (tokens, time)
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self.rejected = 0  # wrong keys within the limit
        self.throttled = 0  # wrong keys beyond it

    def take(self, address: str | None) -> bool:
        """Take a token before a key is looked up. Returns False if there is none."""
        return self._change(address, -1.0)

    def release(self, address: str | None) -> None:
        """Return the token, because the key is valid or could not be looked up."""
        self._change(address, 1.0)

    def count(self, address: str | None, is_within_limit: bool) -> None:
        """Count a wrong key, and log throttled ones at most once in LOG_SECONDS."""
        with self._lock:
            if is_within_limit:
                self.rejected += 1
                return
            self.throttled += 1
            now = time.monotonic()
            if now - self._logged_at < LOG_SECONDS:
                return
            self._logged_at = now
        log.warning("wrong_keys_throttled", address=client_network(address or ""), throttled=self.throttled)

    def retry_after(self, address: str | None) -> float:
        """Return the seconds until the address has a token again."""
        with self._lock:
            tokens, _ = self._read(client_network(address or ""))
        return max(0.0, (1 - tokens) * 60 / self._per_minute)

    def _change(self, address: str | None, amount: float) -> bool:
        name = client_network(address or "")
        with self._lock:
            tokens, now = self._read(name)
            if tokens + amount < 0:
                return False
            self._buckets[name] = (min(tokens + amount, float(self._per_minute)), now)
            self._buckets.move_to_end(name)
            if len(self._buckets) > MAX_ADDRESSES:
                self._buckets.popitem(last=False)
        return True

    def _read(self, name: str) -> tuple[float, float]:
        """Return the current tokens of an address, and the time."""
        now = time.monotonic()
        tokens, at = self._buckets.get(name, (float(self._per_minute), now))
        return min(float(self._per_minute), tokens + (now - at) * self._per_minute / 60), now
