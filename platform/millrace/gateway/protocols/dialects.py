"""How each public API tells what is around an answer: faults, limits, the request's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from millrace.gateway.admission import rates
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.limit_status import LimitStatus


class Dialect:
    """OpenAI's words."""

    id_headers: Sequence[bytes] = (b"x-request-id",)

    def status(self, fault: ApiError) -> int:
        return fault.status

    def body(self, fault: ApiError, request_id: str) -> dict[str, Any]:
        return fault.body()

    def event(self, fault: ApiError, request_id: str, number: int) -> bytes:
        """Return the data of the event that ends a stream, with its number."""
        return msgspec.json.encode(self.body(fault, request_id))

    def rates(self, limit_statuses: Sequence[LimitStatus]) -> rates.Headers:
        return rates.headers(limit_statuses)


class Responses(Dialect):
    """OpenAI's words at /v1/responses."""

    def event(self, fault: ApiError, request_id: str, number: int) -> bytes:
        told = {"code": fault.code, "message": fault.message, "param": fault.param}
        return msgspec.json.encode({"type": "error", **told, "sequence_number": number})


class Anthropic(Dialect):
    """Anthropic's words."""

    id_headers = (b"request-id", b"x-request-id")

    def status(self, fault: ApiError) -> int:
        if fault.type == "insufficient_quota":
            return 402
        if fault.status == 503:
            return 529 if fault.code in _OVERLOADED else 500
        return fault.status

    def body(self, fault: ApiError, request_id: str) -> dict[str, Any]:
        type_ = _TYPES.get(self.status(fault), "invalid_request_error" if fault.status < 500 else "api_error")
        return {"type": "error", "error": {"type": type_, "message": fault.message}, "request_id": request_id}

    def rates(self, limit_statuses: Sequence[LimitStatus]) -> rates.Headers:
        return [*rates.headers(limit_statuses), *rates.anthropic_headers(limit_statuses, datetime.now(UTC))]


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
WORDS: Mapping[str, Dialect] = {"openai.responses": RESPONSES, "anthropic.messages": ANTHROPIC}  # else OPENAI
