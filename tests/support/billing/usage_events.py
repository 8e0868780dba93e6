"""Usage events for tests."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

from inference_worker.contract.messages import BillingContext, ExecutionUsage
from inference_worker.contract.request import TOKEN_COLUMNS, TokenCounts


def make_event(**changes: Any) -> ExecutionUsage:
    """Return a plausible event. `changes` set fields of it, its context or its token usage; `at` is a datetime."""
    at = changes.pop("at", datetime.now(UTC))
    usage = {name: changes.pop(name) for name in TOKEN_COLUMNS if name in changes}
    billing_context: dict[str, Any] = {
        "admitted_at": int(at.timestamp()) * 1_000_000 + at.microsecond,
        "request_id": f"req_{secrets.token_hex(16)}",
        "execution": 0,
        "tenant_id": 1,
        "project_id": 2,
        "key_id": 3,
        "model": "smollm2-135m",
    }
    billing_context |= {name: changes.pop(name) for name in BillingContext.__struct_fields__ if name in changes}
    fields: dict[str, Any] = {
        "attempt": 1,
        "outcome": "completed",
        "finish_reason": "stop",
        "replica_id": "smollm2-135m-0.0a1b2c3d",
        "block_size": 32,
    }
    counts = TokenCounts(**({"uncached": 10, "cache_read": 64, "output": 7} | usage))
    return ExecutionUsage(billing_context=BillingContext(**billing_context), usage=counts, **(fields | changes))
