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


class _CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class _ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """The usage of one response. Chat completions and embeddings have other names than responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None
    completion_tokens_details: _ReasoningTokens | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _CachedTokens | None = None
    output_tokens_details: _ReasoningTokens | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class BatchUsage:
    """The sum of the usage of a batch's responses, in the format of OpenAI's batch object."""

    def __init__(self) -> None:
        self._input = self._cached = self._output = self._reasoning = 0

    def add(self, answer: bytes) -> None:
        """Add the usage of a response."""
        used = msgspec.json.decode(answer, type=_Response).usage or _Usage()
        inputs = used.prompt_tokens_details or used.input_tokens_details or _CachedTokens()
        outputs = used.completion_tokens_details or used.output_tokens_details or _ReasoningTokens()
        self._input += used.prompt_tokens + used.input_tokens
        self._output += used.completion_tokens + used.output_tokens
        self._cached += inputs.cached_tokens
        self._reasoning += outputs.reasoning_tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self._input,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._input + self._output,
        }


WRITERS: dict[str, Callable[[Batch, Line, str], bytes]] = {"openai": openai_line, "anthropic": anthropic_line}
