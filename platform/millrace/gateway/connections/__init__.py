"""Client connections below ASGI: deadlines and limits.

uvicorn runs with `http.GatewayHttpProtocol` and `websocket.GatewayWebSocketProtocol` in place of its own classes. Both
share one `guard.ConnectionGuard` per process, which counts connections and unauthenticated bytes.
"""

from __future__ import annotations

from typing import Any

AUTHENTICATED = "millrace.authenticated"  # the name of the ASGI extension


def mark_authenticated(scope: Any) -> None:
    """Stop counting the bytes of this request as unauthenticated. Does nothing under another ASGI server."""
    mark = (scope.get("extensions") or {}).get(AUTHENTICATED)
    if mark is not None:
        mark()
