"""The dialects' errors and headers: everything in a response apart from the completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from millrace.gateway.admission import rates
from millrace.gateway.core.errors import CONTEXT_EXCEEDED, OVERLOADED, ApiError
from millrace.gateway.core.limit_status import LimitStatus


class Dialect:
    """OpenAI's format."""

    id_headers: Sequence[bytes] = (b"x-request-id",)
    # What keeps a silent stream open. A blank line after the comment would end an event without data: the SDKs of
    # OpenAI dispatch one, and fail, if an earlier event had an ID.
    ping = b": ping\n"

    def status(self, error: ApiError) -> int:
        return error.status

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        return error.body()

    def event(self, error: ApiError, request_id: str, number: int) -> bytes:
        """Return the data of the error event that ends a stream. `number` is the event's sequence number."""
        return msgspec.json.encode(self.body(error, request_id))

    def rates(self, limit_statuses: Sequence[LimitStatus]) -> rates.Headers:
        return rates.headers(limit_statuses)


class Responses(Dialect):
    """OpenAI's format at /v1/responses."""

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        body = error.body()
        if error.is_output_limit:
            body["error"]["param"] = _RESPONSES_LIMIT
            body["error"]["message"] = error.message.replace("max_tokens", _RESPONSES_LIMIT)
        return body

    def event(self, error: ApiError, request_id: str, number: int) -> bytes:
        fields = self.body(error, request_id)["error"]
        del fields["type"]
        return msgspec.json.encode({"type": "error", **fields, "sequence_number": number})


class Anthropic(Dialect):
    """Anthropic's format."""

    id_headers = (b"request-id", b"x-request-id")
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def status(self, error: ApiError) -> int:
        if error.type == "insufficient_quota":
            return 402
        if error.status == 503:
            return 529 if error.code in _OVERLOADED else 500
        return error.status

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        type_ = _TYPES.get(self.status(error), "invalid_request_error" if error.status < 500 else "api_error")
        message: dict[str, Any] = {"type": type_, "message": error.message}
        if error.code == CONTEXT_EXCEEDED:
            prefix = _LIMIT_TOO_LARGE if error.is_output_limit else _PROMPT_TOO_LONG
            message["message"] = prefix + (_state_counts(error) or error.message.removeprefix(prefix))
        if error.code == "thread_not_found":  # the SDK recognizes it by this detail
            message["details"] = {"error_code": error.code}
        return {"type": "error", "error": message, "request_id": request_id}

    def rates(self, limit_statuses: Sequence[LimitStatus]) -> rates.Headers:
        return [*rates.headers(limit_statuses), *rates.anthropic_headers(limit_statuses, datetime.now(UTC))]


def _state_counts(error: ApiError) -> str:
    """Return the tokens of a request that does not fit the context in Anthropic's words, which clients parse."""
    if (counts := error.counts) is None:
        return ""
    if not error.is_output_limit:
        return f"{counts.prompt} tokens > {counts.context} maximum"
    return (
        f"{counts.prompt} + {counts.max_output} > {counts.context}, decrease input length or `max_tokens` and try again"
    )


# Anthropic's texts, by which clients decide whether to shorten the prompt.
_PROMPT_TOO_LONG = "prompt is too long: "
_LIMIT_TOO_LARGE = "input length and `max_tokens` exceed context limit: "
_RESPONSES_LIMIT = "max_output_tokens"
_OVERLOADED = (OVERLOADED, "model_loading")
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}

OPENAI, RESPONSES, ANTHROPIC = Dialect(), Responses(), Anthropic()
API_DIALECTS: Mapping[str, Dialect] = {"openai.responses": RESPONSES, "anthropic.messages": ANTHROPIC}  # others: OPENAI


def requested_dialect(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """Return the dialect of a URL that belongs to none or to both: Anthropic's by its path or its clients' header."""
    is_anthropic = path.startswith("/v1/messages") or b"anthropic-version" in headers
    return ANTHROPIC if is_anthropic else OPENAI
