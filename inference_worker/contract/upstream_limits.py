"""The limits of upstream credentials in Valkey, which the relays of all workers share.

`millrace:upstream_limits:<hash>` is a hash for each upstream, model and credential: what the upstream's headers said.
It expires after the limits have reset. Times are milliseconds of Valkey's clock.

- `resumes_at`: nothing is sent before, because of `retry-after`.
- `requests_*` and `tokens_*`: a token bucket with `limit`, `left` at the time `at`, and `rate` (refill per
  millisecond).
- `sent`, `sent_tokens`: requests and tokens since the key exists. They order a response's headers among the requests.

`millrace:upstream_leases:<credential>` is a sorted set with a lease for each running request of a credential that has
a concurrency limit. The score is the time at which the lease expires, unless its worker renews it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

DIMENSIONS = ("requests", "tokens")
LEASE_MS = 15_000
MAX_LIMIT = 10**12
MAX_RESET_SECONDS = 86_400.0


def limits_key(base_url: str, model: str, credential: int) -> str:
    """Return the key of the limits of an upstream's model for a credential."""
    name = "\0".join((urlsplit(base_url).netloc.lower(), model, str(credential)))
    return f"millrace:upstream_limits:{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"


def leases_key(credential: int) -> str:
    """Return the key of the running requests of a credential."""
    return f"millrace:upstream_leases:{credential}"


@dataclass(frozen=True)
class RateLimitState:
    """The state of an upstream's rate limits; None: unknown, or not limited."""

    resume_seconds: float = 0.0  # until the upstream accepts requests again
    requests_left: int | None = None
    requests_limit: int | None = None
    tokens_left: int | None = None
    tokens_limit: int | None = None


def read_state(fields: Mapping[bytes, bytes], now_ms: float) -> RateLimitState:
    """Return the state at a time of Valkey's clock. Fields that are not numbers are ignored."""
    values: dict[str, float] = {}
    for raw, text in fields.items():
        try:
            values[raw.decode()] = float(text)
        except ValueError:
            continue
    found: dict[str, int | None] = {}
    for name in DIMENSIONS:
        limit, left, at, rate = (values.get(f"{name}_{part}") for part in ("limit", "left", "at", "rate"))
        if limit is None or left is None or at is None or rate is None:
            continue
        found[f"{name}_limit"] = int(limit)
        found[f"{name}_left"] = int(max(0.0, min(limit, left + rate * max(0.0, now_ms - at))))
    return RateLimitState(max(0.0, values.get("resumes_at", 0.0) - now_ms) / 1000, **found)
