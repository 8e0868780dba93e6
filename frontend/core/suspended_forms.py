"""Submitted forms that wait for a re-authentication.

The form is stored in the session. After the re-authentication, the browser is redirected to the form's own URL, where
the stored form is processed once.
"""

from __future__ import annotations

import time
from typing import Any

from allauth.account.utils import get_next_redirect_url
from django.conf import settings
from django.contrib.sessions.models import Session
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.http import urlencode

_ALLAUTH = "account_reauthentication_state"  # where allauth finds the function to call after a re-authentication
_CONFIRMED = "confirmed_form"
_CONFIRMED_SECONDS = 60  # from the re-authentication to the redirected request
_API_KEYS = ("secret", "api_key")  # fields of forms


def suspend_form(request: HttpRequest, page: str) -> HttpResponseRedirect:
    """Store the submitted form without its password, and redirect to the page of the re-authentication.

    A form with an API key is not stored. Its user enters it again.
    """
    url, form = request.get_full_path(), request.POST.copy()
    form.pop("password", None)  # the form asks for it again
    if any(form.get(name) for name in _API_KEYS):
        drop_form(request)
    else:
        request.session[_ALLAUTH] = {
            "state": {"url": url, "form": form.urlencode()},
            "callback": f"{__name__}.{confirm_form.__name__}",
        }
    return HttpResponseRedirect(f"{page}?{urlencode({'next': url})}")


def drop_form(request: HttpRequest) -> None:
    """Forget a form that waits for a re-authentication."""
    request.session.pop(_ALLAUTH, None)


def confirm_form(request: HttpRequest, state: dict[str, Any]) -> HttpResponse:
    """Redirect to the URL of the stored form, to be processed there. allauth calls this after a re-authentication.

    A re-authentication for another URL drops the form, which a thief of the session may have sent.
    """
    url = get_next_redirect_url(request)
    if url != state["url"]:
        return HttpResponseRedirect(url or settings.LOGIN_REDIRECT_URL)
    request.session[_CONFIRMED] = {**state, "at": time.time()}
    return HttpResponseRedirect(state["url"])


def resume_form(request: HttpRequest) -> None:
    """Turn a redirected request into the POST of its confirmed form, if there is one."""
    if request.method == "GET" and (form := _take_confirmed_form(request)) is not None:
        request.FILES  # noqa: B018  (Django would read both from the body later)
        request.method, request.POST = "POST", form  # type: ignore[assignment]


def _take_confirmed_form(request: HttpRequest) -> QueryDict | None:
    """Return the confirmed form of this URL and remove it from the session; None if there is none."""
    confirmed = request.session.get(_CONFIRMED)
    if confirmed is None or confirmed["url"] != request.get_full_path():
        return None
    with transaction.atomic():  # only one of two concurrent requests receives the form
        row = Session.objects.select_for_update().filter(pk=request.session.session_key).first()
        is_first = row is not None and _CONFIRMED in row.get_decoded()
        del request.session[_CONFIRMED]
        request.session.save()
    if not is_first or confirmed["at"] < time.time() - _CONFIRMED_SECONDS:
        return None
    return QueryDict(confirmed["form"])
