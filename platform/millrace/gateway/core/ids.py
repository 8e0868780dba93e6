"""Request IDs: sortable by time and unguessable."""

from __future__ import annotations

import secrets
import time


def new_request_id() -> str:
    """Return `req_` and 32 hexadecimal digits: 48 bits of milliseconds since 1970, then 80 random bits."""
    return f"req_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"
