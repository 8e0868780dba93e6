"""Rules of `Idempotency-Key`, for both APIs. Does not import Django.

Each API stores its calls: the inference API in Valkey (millrace.gateway.admission.idempotency), the management API in
PostgreSQL (tenants.api.idempotency). The stores follow these rules:

- A key belongs to one caller. It is 1 to `MAX_KEY_LENGTH` characters long.
- A call is identified by its target and body. The same key with another fingerprint is a conflict for `RETENTION`.
- While the first call runs, a repeated call is a conflict that can be retried after `RETRY_AFTER_SECONDS`.
- A repeated call receives the stored response, with the header `REPLAYED_HEADER`.
- Rejections and failures are not stored, so a repeated call is decided again.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

KEY_HEADER = "Idempotency-Key"
REPLAYED_HEADER = "idempotent-replayed"
MAX_KEY_LENGTH = 255
RETENTION = timedelta(hours=24)
RETRY_AFTER_SECONDS = 1

CONFLICT = "idempotency_conflict"  # the code of every conflict, with status 409
INVALID_KEY = f"{KEY_HEADER} must have 1 to {MAX_KEY_LENGTH} characters."
KEY_REUSED = f"This {KEY_HEADER} was used for another request. Use a new key."
STILL_RUNNING = f"The first request with this {KEY_HEADER} is still running. Retry later."
RESPONSE_NOT_STORED = "This request was completed before. Its response is too large to be sent again. Use a new key."


def is_valid_key(key: str | bytes) -> bool:
    return 0 < len(key) <= MAX_KEY_LENGTH


def fingerprint(target: str, body: bytes) -> bytes:
    """Return the hash that identifies a call. `target` includes the path; `body` may be the hash of a large body."""
    return hashlib.sha256(target.encode() + b"\0" + body).digest()
