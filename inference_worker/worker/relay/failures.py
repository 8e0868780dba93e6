"""Failures of upstreams, as the platform reports them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

OVERLOADED = "server_is_overloaded"
UPSTREAM_ERROR = "upstream_error"
REJECTED = "upstream_rejected"
MAX_MESSAGE_CHARACTERS = 500
MAX_RETRY_AFTER = 3600.0
MAX_SHARED_RETRY_AFTER = 60.0  # seconds, for a credential that several tenants use
_CAPACITY = (429, 503, 529)  # a later request may succeed
# Parts of the messages with which servers reject a prompt that is too long.
_TOO_LONG = ("context length", "context_length", "prompt is too long", "maximum context", "too many tokens")


class UpstreamFailed(Exception):
    """An upstream's failure to run a request.

    Args:
        code: the public error code.
        is_capacity: whether the upstream only lacks capacity now.
        is_outage: whether the upstream itself has failed, which the circuit breaker counts.
        is_unreachable: whether no connection could be opened, so that no request can be the cause.
        is_quoted: whether the message has text of the upstream.
    """

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after: float | None = None,
        is_capacity: bool = False,
        is_outage: bool = False,
        is_unreachable: bool = False,
        is_quoted: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.is_capacity = is_capacity
        self.is_outage = is_outage
        self.is_unreachable = is_unreachable
        self.is_quoted = is_quoted


def broken(reason: str, *, is_unreachable: bool = False) -> UpstreamFailed:
    """Return the failure of an upstream whose connection or response is broken."""
    message = f"{reason} Send the request again."
    return UpstreamFailed(UPSTREAM_ERROR, message, is_outage=True, is_unreachable=is_unreachable)


def overloaded(retry_after: float | None = None, *, is_outage: bool = False) -> UpstreamFailed:
    """Return the failure of an upstream without capacity."""
    message = "The model's provider has no capacity now. Retry later."
    return UpstreamFailed(OVERLOADED, message, retry_after=retry_after, is_capacity=True, is_outage=is_outage)


def requester_paused(retry_after: float, *, is_credential: bool) -> UpstreamFailed:
    """Return the rejection of a tenant, or of its own credential, whose last requests have failed."""
    subject = "requests with your own credential" if is_credential else "requests to this model"
    message = f"Your last {subject} failed at the model's provider, so new ones are paused. Retry later."
    return UpstreamFailed(OVERLOADED, message, retry_after=retry_after, is_capacity=True)


def response_failure(
    status: int, headers: Mapping[str, str], body: bytes, *, is_tenant_credential: bool = False
) -> UpstreamFailed:
    """Return the failure of a response whose status is not 200.

    The upstream's message is passed on only if it is about the request. Others may name the operator's account.
    """
    code, message, param = _error_fields(body)
    if is_tenant_credential and (status in (401, 403) or (status == 429 and code == "insufficient_quota")):
        text = (
            f"The model's provider refused your own credential (HTTP status {status}). Check its account, or rotate it."
        )
        return UpstreamFailed(UPSTREAM_ERROR, text)
    if status in (400, 413, 422) and _is_too_long(code, message):
        text = message or "The prompt is longer than the model allows."
        return UpstreamFailed("context_length_exceeded", text, param, is_quoted=True)
    if status in (400, 413, 422):
        text = f"The model's provider rejected the request: {message or f'HTTP status {status}'}"
        return UpstreamFailed(REJECTED, text[:MAX_MESSAGE_CHARACTERS], param, is_quoted=True)
    if status == 429 and code == "insufficient_quota":
        return UpstreamFailed(UPSTREAM_ERROR, "The provider's account has no quota left. Contact the operator.")
    if status in _CAPACITY:
        most = MAX_RETRY_AFTER if is_tenant_credential else MAX_SHARED_RETRY_AFTER
        return overloaded(retry_after(headers, most), is_outage=status == 503)
    if status in (401, 403, 404):
        text = f"The model's provider refused the platform's access (HTTP status {status}). Contact the operator."
        return UpstreamFailed(UPSTREAM_ERROR, text)
    return broken(f"The model's provider failed (HTTP status {status}).")


def error_event(error: Any) -> UpstreamFailed:
    """Return the failure that an event within a stream reports."""
    fields = error if isinstance(error, dict) else {}
    kind = str(fields.get("type") or fields.get("code") or "")
    if kind in ("overloaded_error", "rate_limit_error", "429", "529"):
        return overloaded()
    return broken("The model's provider ended the stream with an error.")


def retry_after(headers: Mapping[str, str], most: float, now: float | None = None) -> float | None:
    """Return the seconds after which the upstream accepts requests again, from its headers; None: unknown."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            return min(max(0.0, float(text) / scale), most)
        except ValueError:
            pass
        try:
            at = parsedate_to_datetime(text).timestamp()
        except (ValueError, OverflowError):
            continue
        return min(max(0.0, at - (time.time() if now is None else now)), most)
    return None


def _is_too_long(code: str, message: str) -> bool:
    return code == "context_length_exceeded" or any(part in message.lower() for part in _TOO_LONG)


def _error_fields(body: bytes) -> tuple[str, str, str | None]:
    """Return the code, message and parameter of an error body, in OpenAI's or Anthropic's format."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", "", None
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else None
    if isinstance(error, str):
        return "", error[:MAX_MESSAGE_CHARACTERS], None
    if not isinstance(error, dict):
        return "", "", None
    code, message, param = (error.get(name) for name in ("code", "message", "param"))
    return (
        code if isinstance(code, str) else str(error.get("type") or ""),
        message[:MAX_MESSAGE_CHARACTERS] if isinstance(message, str) else "",
        param[:200] if isinstance(param, str) else None,
    )
