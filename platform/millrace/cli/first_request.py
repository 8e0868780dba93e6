"""The request that the first start of a platform sends to its own engine."""

from __future__ import annotations

import http.client
import json
import time

_SECONDS = 60.0
_BODY = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 8, "stream": True}


def measure_first_token(host: str, port: int, key: str, model: str) -> float | None:
    """Return the seconds until the first token of an answer, or None if the model gives none, such as an encoder."""
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    began, seconds = time.monotonic(), None
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({"model": model, **_BODY}), headers)
        for line in connection.getresponse():
            if seconds is None and b'"content":"' in line and b'"content":""' not in line:
                seconds = time.monotonic() - began
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return seconds
