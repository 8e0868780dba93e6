"""A limit of wrong API keys per client IP address. Does not import Django.

An address has a token bucket of MILLRACE_WRONG_KEYS_PER_MINUTE. A wrong key takes a token, a valid one takes none.
Without a token, a key is still looked up, so a valid key from the same address always passes. The lookup is then
paced (see `millrace.gateway.auth.authentication`), and a wrong key gets a 429 instead of a 401.

The gateway and the management API of one process share the buckets. Other processes have their own.
"""

from __future__ import annotations

import threading
import time

import structlog

from tenants.keys.ip_allowlist import client_network
from tenants.limits.process_buckets import ProcessBuckets

log = structlog.get_logger(__name__)

LOG_SECONDS = 10.0


class WrongKeyThrottle:
    """The token buckets of a process. It is thread-safe."""

    def __init__(self, per_minute: int) -> None:
        self._buckets = ProcessBuckets(per_minute)
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self.rejected = 0  # wrong keys within the limit
        self.throttled = 0  # wrong keys beyond it

    def take(self, address: str | None) -> bool:
        """Take a token before a key is looked up. Returns False if there is none."""
        return self._buckets.take(client_network(address or ""))

    def release(self, address: str | None) -> None:
        """Return the token, because the key is valid or could not be looked up."""
        self._buckets.release(client_network(address or ""))

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
        return self._buckets.retry_after(client_network(address or ""))
