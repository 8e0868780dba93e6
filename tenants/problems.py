"""Errors of the management API as RFC 9457 problem details."""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views import defaults
from psycopg.errors import QueryCanceled
from psycopg_pool import PoolTimeout
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import FieldRefused
from tenants.stored_text import REFUSED


class StateConflict(exceptions.APIException):
    """An error with status 409: the change conflicts with the current state."""

    status_code = HTTPStatus.CONFLICT
    default_detail = "This conflicts with the current state. Reload and try again."
    default_code = "conflict"


class InvalidField(exceptions.ValidationError):
    """An error with status 400 about one field's value."""

    def __init__(self, exc: FieldRefused) -> None:
        super().__init__({exc.field: [str(exc)]})
        self.default_code = exc.code


class StatementTimeout(exceptions.APIException):
    """An error with status 504: a statement reached the time limit of the database."""

    status_code = HTTPStatus.GATEWAY_TIMEOUT
    default_detail = "The request took too long in the database. Use a shorter period, more filters or smaller pages."
    default_code = "timeout"


class NoConnection(exceptions.APIException):
    """An error with status 503: no database connection was free in time."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE
    default_detail = "The platform is busy. Try again later."
    default_code = "unavailable"
    wait = 5


def database_problem(exc: BaseException | None) -> exceptions.APIException | None:
    """Return the problem of a statement that was canceled, or of an exhausted pool. None: another error."""
    if isinstance(exc, OperationalError):
        if isinstance(exc.__cause__, QueryCanceled):
            return StatementTimeout()
        if isinstance(exc.__cause__, PoolTimeout):
            return NoConnection()
    return None


def problem_handler(exc: Exception, context: dict[str, Any]) -> Response | None:
    """Return the problem details of an exception. None: Django handles it as a 500 error."""
    if isinstance(exc, Http404):
        exc = exceptions.NotFound()
    elif isinstance(exc, PermissionDenied):
        exc = exceptions.PermissionDenied()
    elif isinstance(exc, Conflict):
        exc = StateConflict(str(exc), code=exc.code)
    elif isinstance(exc, FieldRefused):
        exc = InvalidField(exc)
    elif isinstance(exc, ActionRefused):
        exc = exceptions.ValidationError(str(exc))
    elif (problem := database_problem(exc)) is not None:
        exc = problem
    if not isinstance(exc, exceptions.APIException):
        return None
    set_rollback()
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(exc.status_code).phrase,
        "status": exc.status_code,
        "code": _code(exc),
    }
    if isinstance(exc, exceptions.ValidationError):
        body["detail"] = "The request is not valid. See `errors`."
        body["errors"] = exc.detail if isinstance(exc.detail, dict) else {"request": exc.detail}
    else:
        body["detail"] = str(exc.detail)
    headers = {}
    if challenge := getattr(exc, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    if wait := getattr(exc, "wait", None):
        headers["Retry-After"] = str(max(1, round(wait)))
    return Response(body, exc.status_code, headers=headers, content_type="application/problem+json")


def _code(exc: exceptions.APIException) -> str:
    codes = exc.get_codes()
    return codes if isinstance(codes, str) else str(exc.default_code)


def unstorable_text(request: HttpRequest, name: str) -> HttpResponse:
    """Return the error of a parameter, form field or cookie whose text cannot be stored, with status 400."""
    if request.path_info.startswith("/api/"):
        return _as_json(exceptions.ValidationError({name: [REFUSED]}))
    return render(request, "frontend/invalid_text.html", status=HTTPStatus.BAD_REQUEST)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Return problem details below /api, and the 404 page of visitors elsewhere."""
    if request.path_info.startswith("/api/"):
        return _as_json(exceptions.NotFound())
    return defaults.page_not_found(request, exception)


def server_error(request: HttpRequest) -> HttpResponse:
    """Return the error of a view that failed. Problems of the database have their own status."""
    problem = database_problem(sys.exception())
    if problem is None:
        return defaults.server_error(request)
    if request.path_info.startswith("/api/"):
        return _as_json(problem)
    is_timeout = isinstance(problem, StatementTimeout)
    return render(request, "frontend/busy.html", {"is_timeout": is_timeout}, status=problem.status_code)


def too_many_requests(wait: float) -> HttpResponse:
    """Return the error of a caller or tenant with too many requests, with status 429."""
    detail = "Too many requests. Send at most 3 concurrently, and expensive ones less often."
    return _as_json(exceptions.Throttled(wait, detail))


def _as_json(exc: exceptions.APIException) -> HttpResponse:
    """Return the problem details of an exception outside of a view of the management API."""
    answer = problem_handler(exc, {})
    if answer is None:
        raise exc
    response = JsonResponse(answer.data, status=answer.status_code, content_type=answer.content_type)
    if wait := answer.headers.get("Retry-After"):
        response.headers["Retry-After"] = wait
    return response
