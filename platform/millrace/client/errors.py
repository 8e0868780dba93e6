"""Errors of the client. Their messages contain the reported reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_TEXT = 500  # characters shown of a response that is not an error of the API


class MillraceError(Exception):
    """Base of the client's errors."""


class ConnectionFailed(MillraceError):
    """The server cannot be reached, or it did not respond in time."""


class StatusError(MillraceError):
    """A response with an error status.

    Attributes:
        status: the HTTP status.
        code: the machine-readable code, such as `not_found`.
        detail: the text of the error.
        errors: the errors by field of a request that is not valid.
        retry_after: the seconds after which the request may be repeated, if the server sent them.
    """

    def __init__(
        self, status: int, code: str, detail: str, errors: Mapping[str, Any], retry_after: float | None = None
    ) -> None:
        fields = "; ".join(f"{name}: {_flat(texts)}" for name, texts in errors.items())
        super().__init__(fields or detail or f"The server answered with status {status}.")
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = errors
        self.retry_after = retry_after


class InvalidRequest(StatusError):
    """Status 400: see `errors`."""


class AuthenticationFailed(StatusError):
    """Status 401, or 403 without credentials: the API key or the session is not valid."""


class PermissionDenied(StatusError):
    """Status 403: the caller lacks a permission."""


class ReauthenticationNeeded(PermissionDenied):
    """Status 403: an operator must sign in again before a change."""


class NotFound(StatusError):
    """Status 404: the object does not exist, or belongs to another tenant."""


class ConflictError(StatusError):
    """Status 409: the change conflicts with the current state."""


class RateLimited(StatusError):
    """Status 429, after all retries."""


class ServerError(StatusError):
    """Status 500 or above, after all retries."""


_BY_STATUS: dict[int, type[StatusError]] = {
    400: InvalidRequest,
    401: AuthenticationFailed,
    403: PermissionDenied,
    404: NotFound,
    409: ConflictError,
    429: RateLimited,
}
_BY_CODE: dict[str, type[StatusError]] = {
    "authentication_failed": AuthenticationFailed,
    "not_authenticated": AuthenticationFailed,
    "reauthentication_required": ReauthenticationNeeded,
}


def error_of(status: int, body: Any, text: str, retry_after: float | None) -> StatusError:
    """Return the error of a response. `body` is its decoded JSON, None if it has none."""
    problem = body if isinstance(body, dict) else {}
    code = str(problem.get("code", ""))
    errors = problem.get("errors")
    by_status = _BY_STATUS.get(status, ServerError if status >= 500 else StatusError)
    detail = str(problem.get("detail") or "" if problem else text[:MAX_TEXT])
    return _BY_CODE.get(code, by_status)(status, code, detail, errors if isinstance(errors, dict) else {}, retry_after)


def _flat(texts: Any) -> str:
    if isinstance(texts, dict):
        return "; ".join(f"{name}: {_flat(inner)}" for name, inner in texts.items())
    return " ".join(map(_flat, texts)) if isinstance(texts, list) else str(texts)
