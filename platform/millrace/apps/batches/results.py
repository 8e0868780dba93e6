"""Lines of the result files of a finished batch, in both API dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from millrace.apps.batches.models import Batch, Line

_encode = msgspec.json.Encoder().encode
_UNANSWERED = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was run."),
    "expired": ("batch_expired", "This request could not be run before the batch expired."),
}


def line_outcome(line: Line, unanswered: str) -> str:
    """Return how the line ended: succeeded, errored or, without an answer, `unanswered`."""
    if line.status is None:
        return unanswered
    return "succeeded" if line.status < 400 else "errored"


def openai_line(batch: Batch, line: Line, outcome: str) -> bytes:
    response, error = None, None
    if line.answer is not None:
        body = msgspec.Raw(bytes(line.answer))
        response = {"status_code": line.status, "request_id": line.request_id, "body": body}
    else:
        code, message = _UNANSWERED[outcome]
        error = {"code": code, "message": message}
    name = f"batch_req_{batch.name.removeprefix('batch_')}_{line.number}"
    return _encode({"id": name, "custom_id": line.custom_id, "response": response, "error": error}) + b"\n"


def anthropic_line(batch: Batch, line: Line, outcome: str) -> bytes:
    result: dict[str, Any] = {"type": "canceled" if outcome == "cancelled" else outcome}
    if line.answer is not None:
        result["message" if outcome == "succeeded" else "error"] = msgspec.Raw(bytes(line.answer))
    return _encode({"custom_id": line.custom_id, "result": result}) + b"\n"


WRITERS: dict[str, Callable[[Batch, Line, str], bytes]] = {"openai": openai_line, "anthropic": anthropic_line}
