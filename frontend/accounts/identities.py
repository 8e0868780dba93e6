"""Identities at the OpenID Connect provider: which callbacks are accepted, and re-authentication at the provider."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

from allauth.account.adapter import get_adapter as account_adapter
from allauth.account.internal.flows.login import record_authentication
from allauth.account.internal.flows.reauthentication import resume_request
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.models import SocialAccount
from allauth.socialaccount.providers.base.constants import AuthProcess
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext as _

from frontend.accounts.recent_sign_in import leave_to_reauthenticate
from frontend.core.form_targets import allow_form_target
from tenants.models import User
from tenants.reauthentication import recently_authenticated

REAUTHENTICATE = "reauthenticate"  # a value of allauth's parameter `process`, next to login and connect


def has_identity(user: User) -> bool:
    """Return whether the user can sign in at the configured provider."""
    return bool(settings.MILLRACE.oidc_issuer) and SocialAccount.objects.filter(user=user).exists()


def allow_provider(response: HttpResponse) -> HttpResponse:
    """Let the form of a page lead to the provider.

    No setting names the hosts of these redirects, so every host with HTTPS is allowed, or an HTTP issuer.
    """
    if issuer := settings.MILLRACE.oidc_issuer:
        parts = urlsplit(issuer)
        allowed = "https:" if parts.scheme == "https" else f"{parts.scheme}://{parts.netloc}"
        return allow_form_target(response, allowed)
    return response


def check_callback(request: HttpRequest, sociallogin: Any) -> None:
    """Decide about an identity that the provider confirmed, before allauth signs in, links or connects.

    Raises:
        ImmediateHttpResponse: the callback is answered here.
    """
    if sociallogin.is_existing and not sociallogin.user.is_active:
        raise ImmediateHttpResponse(account_adapter().respond_user_inactive(request, sociallogin.user))
    process = sociallogin.state.get("process")
    if process == AuthProcess.CONNECT and request.user.is_authenticated and not recently_authenticated(request):
        # NOTE: allauth would store the identity in the session, and connect it at the next re-authentication.
        raise ImmediateHttpResponse(leave_to_reauthenticate(request, reverse("socialaccount_connections")))
    if process == REAUTHENTICATE:
        raise ImmediateHttpResponse(_reauthenticate(request, sociallogin))


def _reauthenticate(request: HttpRequest, sociallogin: Any) -> HttpResponse:
    """Record a round trip to the provider as the user's re-authentication. The session stays the same.

    The page asks the provider to authenticate the user again, by a parameter that the user can remove. Therefore the
    time of the authentication must be recent, if the ID token contains it.
    """
    url, account = sociallogin.state.get("next") or reverse("account"), sociallogin.account
    if not request.user.is_authenticated or account.user_id != request.user.pk:
        messages.error(request, _("This identity is not connected to your account."))
        return redirect("account")
    since = time.time() - settings.ACCOUNT_REAUTHENTICATION_TIMEOUT
    if account.extra_data.get("auth_time", since) < since:
        messages.error(request, _("Your identity provider did not ask you to sign in again."))
        return redirect("account")
    record_authentication(
        request, request.user, "socialaccount", provider=account.provider, uid=account.uid, reauthenticated=True
    )
    query = request.GET.copy()
    query["next"] = url  # where allauth looks for it
    request.GET = query  # type: ignore[assignment]
    resumed: HttpResponse | None = resume_request(request)
    return resumed or redirect(url)
