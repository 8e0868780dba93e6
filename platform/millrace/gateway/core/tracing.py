"""Which trace a request belongs to (W3C Trace Context), and what all its log lines name.

Both live in the context of the request's task: whatever is logged there names the request, its trace and its tenant,
and the job that it becomes carries the trace on.
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
    """From here on this task serves that request. `header`: its `traceparent`, if it has one."""
    traceparent = continued(header)
    _current.set(traceparent)
    structlog.contextvars.bind_contextvars(request_id=request_id, trace_id=trace_id(traceparent))


def name_tenant(key: ApiKeySnapshot) -> None:
    """Set the tenant and key of the request's log lines."""
    structlog.contextvars.bind_contextvars(tenant_id=key.tenant_id, key_id=key.key_id)


def current() -> str:
    """Return the `traceparent` to pass on; empty where no request is served."""
    return _current.get()


def continued(header: bytes | None) -> str:
    """Return a new `traceparent`: a step of the caller's trace, or the first of a new trace."""
    found = _TRACEPARENT.fullmatch((header or b"").decode("latin-1"))
    if found:
        version, trace, parent, flags, more = found.groups()
        # Later versions may say more after the flags; this one may not, and ff is none.
        if version != "ff" and not (version == "00" and more) and int(trace, 16) and int(parent, 16):
            return f"00-{trace}-{secrets.token_hex(8)}-{int(flags, 16) & 1:02x}"
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
