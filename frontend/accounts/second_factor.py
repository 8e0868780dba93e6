"""The second factor of operators: sessions without it reach no page of the console and no management API."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from allauth.account.internal.flows.login import record_authentication
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.views import ActivateTOTPView
from django import forms
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect, JsonResponse
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from frontend.accounts.totp_codes import use_code
from frontend.core.page_context import leave_for, page_of
from tenants.models import User
from tenants.reauthentication import proofs_of, reauthentication_route


class OperatorSecondFactor:
    """Middleware in front of every view of Django: the console, the operator pages and the management API.

    An operator with TOTP or a passkey must have used it in this session, however the session was created. An operator
    with neither must set up one if MILLRACE_REQUIRE_OPERATOR_TOTP applies. Requests with an API key carry no session
    and pass.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        user = request.user
        if not isinstance(user, User) or not user.is_staff or _is_always_open(request):
            return self.get_response(request)
        proofs = proofs_of(request)
        if proofs.is_second_factor_missing:
            if request.path in (reverse("mfa_reauthenticate"), reverse("mfa_reauthenticate_webauthn")):
                return self.get_response(request)
            url = f"{reverse(reauthentication_route(user))}?{urlencode({'next': page_of(request)})}"
            return _refuse(request, "second_factor_required", _("Complete two-factor authentication first."), url)
        if settings.OPERATORS_NEED_TOTP and not proofs.has_second_factor and not request.path.startswith("/account/"):
            detail = _("Operators must set up two-factor authentication first.")
            return _refuse(request, "totp_required", detail, reverse("mfa_activate_totp"))
        return self.get_response(request)


class SecondFactorActivateTotp(ActivateTOTPView):
    """Enrollment of TOTP. The code that confirms the new device also completes this session."""

    def form_valid(self, form: forms.Form) -> HttpResponse:
        response: HttpResponse = super().form_valid(form)
        device = Authenticator.objects.get(user=self.request.user, type=Authenticator.Type.TOTP)
        use_code(device, form.cleaned_data["code"])
        record_authentication(self.request, device.user, "mfa", id=device.pk, type=device.type, reauthenticated=True)
        return response


def lock_user(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Run a view that adds to the user's second factors in a transaction that locks the user.

    A second click finds the result of the first one. Without the lock, both would insert the same row.
    """

    @wraps(view)
    def run(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponse:
        if request.method != "POST" or not request.user.is_authenticated:
            return view(request, *args, **kwargs)
        with transaction.atomic():
            User.objects.select_for_update(no_key=True).filter(pk=request.user.pk).first()
            return view(request, *args, **kwargs)

    return run


def _is_always_open(request: HttpRequest) -> bool:
    """Return whether the request only signs out or loads a static file."""
    return request.path.startswith(settings.STATIC_URL) or request.path == reverse("account_logout")


def _refuse(request: HttpRequest, code: str, detail: str, url: str) -> HttpResponseBase:
    """Refuse an API request with a problem document; redirect a page to where the second factor is entered."""
    if request.path.startswith("/api/"):
        problem = {"type": "about:blank", "title": "Forbidden", "status": 403, "code": code, "detail": detail}
        return JsonResponse(problem, status=403, content_type="application/problem+json")
    return leave_for(request, HttpResponseRedirect(url))
