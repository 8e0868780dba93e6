"""The rule of a recent sign-in for the pages of passwords, second factors and identities.

`tenants.reauthentication` has the rule. AccountAdapter applies it to what allauth guards itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from allauth.account.internal.flows.reauthentication import STATE_SESSION_KEY
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.http import urlencode

from frontend.core.layout import signed_in_user
from tenants.reauthentication import reauthentication_route, recently_authenticated

View = Callable[..., HttpResponse]


def leave_to_reauthenticate(request: HttpRequest, url: str) -> HttpResponseRedirect:
    """Redirect to the page of the re-authentication, and from there to the URL. A form that was sent is not stored."""
    request.session.pop(STATE_SESSION_KEY, None)
    page = reverse(reauthentication_route(signed_in_user(request)))
    return HttpResponseRedirect(f"{page}?{urlencode({'next': url})}")


def recent_sign_in_required(view: View) -> View:
    """Decorate a view for signed-in users who must have authenticated recently. Its form may contain secrets."""

    @login_required
    @wraps(view)
    def guard(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not recently_authenticated(request):
            return leave_to_reauthenticate(request, request.get_full_path())
        return view(request, *args, **kwargs)

    return guard
