"""Errors of the management API as RFC 9457 problem details."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views.defaults import page_not_found
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import FieldRefused


class StateConflict(exceptions.APIException):
    """409: it cannot be done as things stand."""

    status_code = HTTPStatus.CONFLICT
    default_detail = "This cannot be done as things stand."
    default_code = "conflict"


class InvalidField(exceptions.ValidationError):
    """400: the value of one field was refused, for the reason that `code` names."""

    def __init__(self, fault: FieldRefused) -> None:
        super().__init__({fault.field: [str(fault)]})
        self.default_code = fault.code


def problem_handler(fault: Exception, context: dict[str, Any]) -> Response | None:
    """DRF's EXCEPTION_HANDLER. None lets Django's own 500 handling take over."""
    if isinstance(fault, Http404):
        fault = exceptions.NotFound()
    elif isinstance(fault, PermissionDenied):
        fault = exceptions.PermissionDenied()
    elif isinstance(fault, Conflict):
        fault = StateConflict(str(fault))
    elif isinstance(fault, FieldRefused):
        fault = InvalidField(fault)
    elif isinstance(fault, ActionRefused):
        fault = exceptions.ValidationError(str(fault))
    if not isinstance(fault, exceptions.APIException):
        return None
    set_rollback()
    problem: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(fault.status_code).phrase,
        "status": fault.status_code,
        "code": _code(fault),
    }
    if isinstance(fault, exceptions.ValidationError):
        problem["detail"] = "The request is not valid: see `errors`."
        problem["errors"] = fault.detail if isinstance(fault.detail, dict) else {"request": fault.detail}
    else:
        problem["detail"] = str(fault.detail)
    headers = {}
    if challenge := getattr(fault, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    if wait := getattr(fault, "wait", None):
        headers["Retry-After"] = str(max(1, round(wait)))
    return Response(problem, fault.status_code, headers=headers, content_type="application/problem+json")


def _code(fault: exceptions.APIException) -> str:
    codes = fault.get_codes()
    return codes if isinstance(codes, str) else str(fault.default_code)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's handler404: below /api a problem like all others of it, elsewhere the page."""
    answer = problem_handler(exceptions.NotFound(), {}) if request.path_info.startswith("/api/") else None
    if answer is None:
        return page_not_found(request, exception)
    return JsonResponse(answer.data, status=answer.status_code, content_type=answer.content_type)
