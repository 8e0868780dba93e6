"""The errors of the API, in OpenAI's error format. docs/reference/errors.md lists all codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tenants import idempotency_rules

if TYPE_CHECKING:
    from millrace.gateway.core.limit_status import LimitStatus

OVERLOADED = "server_is_overloaded"
CONTEXT_EXCEEDED = "context_length_exceeded"

# code -> (HTTP status, type). A code that is not listed is an internal error: 500.
CODES = {
    "context_length_exceeded": (400, "invalid_request_error"),
    "unsupported_parameter": (400, "invalid_request_error"),
    "unknown_parameter": (400, "invalid_request_error"),
    "missing_required_parameter": (400, "invalid_request_error"),
    "invalid_type": (400, "invalid_request_error"),
    "invalid_value": (400, "invalid_request_error"),
    "invalid_http": (400, "invalid_request_error"),
    "invalid_json": (400, "invalid_request_error"),
    "invalid_prompt": (400, "invalid_request_error"),
    "invalid_schema": (400, "invalid_request_error"),
    "unsupported_schema": (400, "invalid_request_error"),
    "invalid_api_key": (401, "invalid_request_error"),
    "model_not_allowed": (403, "permission_error"),
    "insufficient_scope": (403, "permission_error"),
    "tenant_suspended": (403, "permission_error"),
    "model_not_found": (404, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "thread_not_found": (404, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "request_timeout": (408, "invalid_request_error"),
    "conflict": (409, "invalid_request_error"),
    idempotency_rules.CONFLICT: (409, "invalid_request_error"),
    "feedback_conflict": (409, "invalid_request_error"),
    "not_cached": (412, "invalid_request_error"),
    "request_too_large": (413, "invalid_request_error"),
    "unsupported_encoding": (415, "invalid_request_error"),
    "invalid_encoding": (400, "invalid_request_error"),
    "uri_too_long": (414, "invalid_request_error"),
    "headers_too_large": (431, "invalid_request_error"),
    "too_many_connections": (429, "rate_limit_error"),
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "upstream_limit_reached": (429, "rate_limit_error"),
    "budget_exceeded": (429, "insufficient_quota"),
    "quota_exceeded": (429, "insufficient_quota"),
    "credit_balance_exhausted": (429, "insufficient_quota"),
    "cancelled": (499, "invalid_request_error"),
    "timeout": (504, "service_unavailable_error"),
    "first_token_timeout": (504, "service_unavailable_error"),
    "request_expired": (504, "service_unavailable_error"),
    OVERLOADED: (503, "service_unavailable_error"),
    "model_not_priced": (503, "service_unavailable_error"),
    "model_loading": (503, "service_unavailable_error"),
    "worker_lost": (503, "service_unavailable_error"),
    "stream_lost": (503, "service_unavailable_error"),
    "not_served": (500, "server_error"),
    "upstream_error": (502, "server_error"),
    "upstream_rejected": (400, "invalid_request_error"),
}
_RETRYABLE = frozenset(
    {OVERLOADED, "model_loading", "worker_lost", "stream_lost", "upstream_error", "first_token_timeout"}
)
_NOT_RETRYABLE = frozenset({"not_served", "model_not_priced"})  # a retry would fail in the same way
_BILLING_CODES = frozenset({"tenant_suspended", "budget_exceeded", "quota_exceeded", "credit_balance_exhausted"})


class ContextCounts(NamedTuple):
    """The tokens of a request that does not fit the context."""

    prompt: int
    max_output: int
    context: int


class ApiError(Exception):
    """An error that ends a request: an HTTP status before the first token, an event in the stream after it."""

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after: float | None = None,
        limit_statuses: Sequence[LimitStatus] | None = None,
        bound: Mapping[str, Any] | None = None,
        counts: ContextCounts | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status, self.type = CODES.get(code, (500, "server_error"))
        self.limit_statuses = limit_statuses  # the state of the rate limits, if known
        self.counts = counts  # set if the tokens of the request do not fit the context, and are known
        self.bound = bound  # the limit or budget that rejected the request, for its record
        self.retry_after = 1.0 if retry_after is None and code in _RETRYABLE else retry_after

    @property
    def is_output_limit(self) -> bool:
        """Return whether a smaller output limit is enough for the request to fit the context."""
        return self.code == CONTEXT_EXCEEDED and self.param == "max_tokens"

    def body(self) -> dict[str, Any]:
        # Agents shorten their conversation if the code is that of a long prompt.
        code = "invalid_value" if self.is_output_limit else self.code
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        is_permanent = self.status in (409, 429) and self.retry_after is None
        if self.code in _BILLING_CODES or self.code in _NOT_RETRYABLE or is_permanent or (self.retry_after or 0) > 60:
            headers.append((b"x-should-retry", b"false"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def unknown_url(method: str, path: str, base_url: str) -> ApiError:
    """Return the error of a URL that no endpoint has. The usual cause is a wrong base URL."""
    message = f"Unknown request URL: {method} {path[:200]}. The base URL of OpenAI's clients is {base_url}/v1, that of"
    return ApiError("not_found", f"{message} Anthropic's {base_url}.")


def unavailable() -> ApiError:
    """Return the error while Valkey or the database is unavailable."""
    return ApiError(OVERLOADED, "The service is temporarily unavailable. Retry later.", retry_after=1)


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(code, message, param)
