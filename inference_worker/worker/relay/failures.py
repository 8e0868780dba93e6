"""Failures of upstreams, as the platform reports them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import msgspec

OVERLOADED = "server_is_overloaded"
UPSTREAM_ERROR = "upstream_error"
REJECTED = "upstream_rejected"
MAX_MESSAGE_CHARACTERS = 500
MAX_RETRY_AFTER = 3600.0
MAX_SHARED_RETRY_AFTER = 60.0  # seconds, for a credential that several tenants use
_CAPACITY = (429, 503, 529)  # a later request may succeed
# The codes and the messages with which servers reject a prompt that is too long: OpenAI, Anthropic, Google, Mistral,
# Cohere, xAI, Bedrock, DashScope, Zhipu, Moonshot, Groq, Together, TGI, vLLM, SGLang, llama.cpp, Ollama and LM Studio.
_OVERFLOW_CODES = {
    "context_length_exceeded", "context_window_exceeded", "exceed_context_size_error", "exceed_context_size",
    "max_context_length_exceeded", "model_context_window_exceeded", "prompt_too_long", "input_too_long", "1261",
}  # fmt: skip
_OVERFLOW = re.compile(
    r"context[ _-]?(length|window|size|limit)|maximum (context|prompt|input)"
    r"|(prompt|input|request|messages?) (is |are )?too long|longer than the (model|context|maximum)"
    r"|too many (input |prompt )?tokens|reduce the length of|(input|prompt) (token count|length)|model token limit"
    r"|prompt exceeds|inputs`? (tokens|must have less than)|tokens in the prompt cannot exceed|context the overflows"
    r"|exceeds? the (maximum |available )?(context|number of tokens|input)"
)
_OVERLOADED = {
    "overloaded_error", "overloaded", "server_overloaded", "engine_overloaded", "engine_overloaded_error",
    "rate_limit_error", "rate_limit_exceeded", "429", "503", "529",
}  # fmt: skip
_MAX_NESTED = 4  # objects and lists around an error's message
_RATE_CODES = {"rate_limit_exceeded", "rate_limit_error", "tokens", "requests"}  # codes of limits per minute


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


def make_upstream_failure(reason: str, *, is_unreachable: bool = False) -> UpstreamFailed:
    """Return the failure of an upstream whose connection or response is broken."""
    message = f"{reason} Send the request again."
    return UpstreamFailed(UPSTREAM_ERROR, message, is_outage=True, is_unreachable=is_unreachable)


def make_finish_failure(reason: str) -> UpstreamFailed:
    """Return the failure of an answer that ended with a reason that is unknown or an error.

    Such an answer may be cut, filtered or wrong.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "", reason)[:40]
    return UpstreamFailed(UPSTREAM_ERROR, f"The model's provider ended the answer with the reason {name!r}.")


def make_overload_failure(retry_after: float | None = None, *, is_outage: bool = False) -> UpstreamFailed:
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
    error = _read_error(body)
    code, message, param = error.code, error.message, error.param
    if is_tenant_credential and (status in (401, 403) or (status == 429 and code == "insufficient_quota")):
        text = (
            f"The model's provider refused your own credential (HTTP status {status}). Check its account, or rotate it."
        )
        return UpstreamFailed(UPSTREAM_ERROR, text)
    if status != 429 and _is_overflow(error, reads_message=status in (400, 413, 422)):
        text = message or "The prompt is longer than the model allows."
        return UpstreamFailed("context_length_exceeded", text, param, is_quoted=True)
    if status in (400, 413, 422):
        text = f"The model's provider rejected the request: {message or f'HTTP status {status}'}"
        return UpstreamFailed(REJECTED, text[:MAX_MESSAGE_CHARACTERS], param, is_quoted=True)
    if status == 429 and code == "insufficient_quota":
        return UpstreamFailed(UPSTREAM_ERROR, "The provider's account has no quota left. Contact the operator.")
    if status in _CAPACITY:
        most = MAX_RETRY_AFTER if is_tenant_credential else MAX_SHARED_RETRY_AFTER
        return make_overload_failure(retry_after(headers, most), is_outage=status == 503)
    if status in (401, 403, 404):
        text = f"The model's provider refused the platform's access (HTTP status {status}). Contact the operator."
        return UpstreamFailed(UPSTREAM_ERROR, text)
    return make_upstream_failure(f"The model's provider failed (HTTP status {status}).")


def error_event(error: Any) -> UpstreamFailed:
    """Return the failure that an event within a stream reports."""
    found = _read_fields(error)
    if _is_overflow(found, reads_message=True):
        text = found.message or "The prompt is longer than the model allows."
        return UpstreamFailed("context_length_exceeded", text, found.param, is_quoted=True)
    if found.names & _OVERLOADED:
        return make_overload_failure()
    return make_upstream_failure("The model's provider ended the stream with an error.")


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


class _Error(NamedTuple):
    """An error of an upstream.

    code: its code, or its type if it has none.
    names: its code, type and status, in lower case.
    """

    code: str = ""
    message: str = ""
    param: str | None = None
    names: frozenset[str] = frozenset()


def _is_overflow(error: _Error, *, reads_message: bool) -> bool:
    """Return whether the error rejects a prompt that is too long."""
    if error.names & _OVERFLOW_CODES:
        return True
    return reads_message and not error.names & _RATE_CODES and _OVERFLOW.search(error.message.lower()) is not None


def _read_error(body: bytes) -> _Error:
    """Return the error in a response's body."""
    try:
        return _read_fields(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Error()


def _read_fields(error: Any) -> _Error:
    """Return an error in the format of OpenAI, Anthropic, Google, FastAPI or TGI: a text, an object or a list."""
    fields: dict[str, Any] = {}
    for _ in range(_MAX_NESTED):
        if isinstance(error, list) and error:
            error = error[0]
        elif isinstance(error, dict):
            fields = {**fields, **error}
            error = next((error[name] for name in ("error", "detail") if error.get(name)), None)
    if isinstance(error, str):
        fields["message"] = error
    code, kind, message, param = (fields.get(name) for name in ("code", "type", "message", "param"))
    message = fields.get("msg") if message is None else message
    names = (code, kind, fields.get("error_type"), fields.get("status"))
    return _Error(
        code if isinstance(code, str) else str(kind or ""),
        message[:MAX_MESSAGE_CHARACTERS] if isinstance(message, str) else "",
        param[:200] if isinstance(param, str) else None,
        frozenset(str(name).lower() for name in names if isinstance(name, str | int)),
    )
