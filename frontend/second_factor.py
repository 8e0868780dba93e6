"""Operators who must have a second factor see nothing until they have one."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.shortcuts import redirect
from django.urls import reverse

from tenants.models import User
from tenants.stepup import has_totp


class OperatorsNeedTotp:
    """Leads an operator without TOTP to its enrolment, wherever they wanted to go (see MILLRACE_REQUIRE_OPERATOR_TOTP).

    A key is no person and is let through: its bearer token is what its caller has.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        user = request.user
        if not settings.OPERATORS_NEED_TOTP or not isinstance(user, User) or not user.is_staff or _open(request):
            return self.get_response(request)
        if has_totp(user):
            return self.get_response(request)
        if request.path.startswith("/api/"):
            problem = {"type": "about:blank", "title": "Forbidden", "status": 403, "code": "totp_required"}
            detail = {"detail": "Operators must enrol a second factor first."}
            return JsonResponse(problem | detail, status=403, content_type="application/problem+json")
        return redirect("mfa_activate_totp")


def _open(request: HttpRequest) -> bool:
    """Whether one needs the page to enrol, or to leave."""
    return request.path.startswith(("/account/", "/static/")) or request.path == reverse("account_logout")
