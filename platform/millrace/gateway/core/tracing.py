"""The request's trace (W3C Trace Context) and the fields of its log lines.

Both are stored in the context of the request's task. Every log line names the request, its trace and its tenant, and
the job that is sent to a worker carries the trace.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

import structlog

from inference_worker.contract.messages import trace_id
from tenants.keys.snapshot import ApiKeySnapshot

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_current: ContextVar[str] = ContextVar("traceparent", default="")


def begin(request_id: str, header: bytes | None = None) -> None:
    """Start the request's trace and bind it to the log lines of this task. `header` is its `traceparent`, if any."""
    traceparent = continue_trace(header)
    _current.set(traceparent)
    structlog.contextvars.bind_contextvars(request_id=request_id, trace_id=trace_id(traceparent))


def name_tenant(key: ApiKeySnapshot) -> None:
    """Bind the tenant and the key to the request's log lines."""
    structlog.contextvars.bind_contextvars(tenant_id=key.tenant_id, key_id=key.key_id)


def current_traceparent() -> str:
    """Return the `traceparent` to pass on, or an empty string outside a request."""
    return _current.get()


def continue_trace(header: bytes | None) -> str:
    """Return a new `traceparent`: a span of the client's trace, or the first span of a new trace."""
    match = _TRACEPARENT.fullmatch((header or b"").decode("latin-1"))
    if match:
        version, trace, parent, flags, more = match.groups()
        # Later versions may append fields after the flags; version 00 may not, and ff is invalid.
        if version != "ff" and not (version == "00" and more) and int(trace, 16) and int(parent, 16):
            return f"00-{trace}-{secrets.token_hex(8)}-{int(flags, 16) & 1:02x}"
    digits = secrets.token_hex(24)
    return f"00-{digits[:32]}-{digits[32:]}-00"
