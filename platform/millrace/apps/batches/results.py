"""A finished batch's lines as its result files have them, in both dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from millrace.apps.batches.models import Batch, Line

_encode = msgspec.json.Encoder().encode
_WHY = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was run."),
    "expired": ("batch_expired", "This request could not be run before the batch expired."),
}


def ending(line: Line, unanswered: str) -> str:
    """How the line ended: succeeded, errored, or what became of those without an answer."""
    if line.status is None:
        return unanswered
    return "succeeded" if line.status < 400 else "errored"


def openai_line(batch: Batch, line: Line, end: str) -> bytes:
    response, error = None, None
    if line.answer is not None:
        body = msgspec.Raw(bytes(line.answer))
        response = {"status_code": line.status, "request_id": line.request_id, "body": body}
    else:
        code, message = _WHY[end]
        error = {"code": code, "message": message}
    name = f"batch_req_{batch.name.removeprefix('batch_')}_{line.number}"
    return _encode({"id": name, "custom_id": line.custom_id, "response": response, "error": error}) + b"\n"


def anthropic_line(batch: Batch, line: Line, end: str) -> bytes:
    result: dict[str, Any] = {"type": "canceled" if end == "cancelled" else end}
    if line.answer is not None:
        result["message" if end == "succeeded" else "error"] = msgspec.Raw(bytes(line.answer))
    return _encode({"custom_id": line.custom_id, "result": result}) + b"\n"


WRITERS: dict[str, Callable[[Batch, Line, str], bytes]] = {"openai": openai_line, "anthropic": anthropic_line}
