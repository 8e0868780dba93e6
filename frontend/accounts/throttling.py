"""Throttling of sign-in attempts by client address and known device.

A device becomes known to a user when it completes a sign-in: the response sets a signed cookie that is bound to the
user and to the user's password. A new password makes all devices of the user unknown. The device that changed it gets a
new cookie.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Literal, cast

from django.conf import settings
from django.core import signing
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponseBase
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.translation import gettext as _

from tenants.login_throttle import Attempt, Throttled
from tenants.models import User
from tenants.password_checks import session_device, throttle

COOKIE = "device"  # followed by the user's ID, because several users can share a browser
COOKIE_SECONDS = 400 * 24 * 3600  # the maximum of browsers
_SALT = "frontend.accounts.throttling.device"
_WAIT, _REMEMBER = "_throttle_wait", "_throttle_remember"


@contextmanager
def attempt(request: HttpRequest, step: str, email: str) -> Iterator[Attempt]:
    """Count an attempt before its secret is checked. The block calls `succeed` if the secret was right.

    Raises:
        ValidationError: the attempt must wait. The message and the Retry-After header contain the time.
    """
    try:
        counted = throttle().begin(step, email, request.META.get("REMOTE_ADDR", ""), device_of(request, email))
    except Throttled as exc:
        setattr(request, _WAIT, max(exc.seconds, getattr(request, _WAIT, 0)))
        raise ValidationError(
            _("Too many failed attempts. Try again in %(in_words)s.") % {"in_words": in_words(exc.seconds)},
            code="too_many_login_attempts",
        ) from exc
    yield counted


def in_words(seconds: int) -> str:
    """Return a waiting time as text, rounded up."""
    number, unit = (seconds, "second") if seconds < 120 else (-(-seconds // 60), "minute")
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def device_of(request: HttpRequest, email: str) -> str:
    """Return the ID of a device that has signed in as this user, from its cookie or its open session."""
    user = User.objects.filter(email=email.strip().lower()).first()
    if user is None:
        return ""
    if found := _read_device_id(request, user):
        return found
    if request.user.is_authenticated and request.user.pk == user.pk:
        return session_device(request)
    return ""


def remember_device(request: HttpRequest, user: User, *, renew: bool = False) -> None:
    """Set the cookie that makes the device known to the user. `renew` sets a new ID."""
    known = "" if renew else _read_device_id(request, user)
    setattr(request, _REMEMBER, (user, known or secrets.token_hex(16)))


def cookie_name(user: User) -> str:
    return f"{COOKIE}_{user.pk}"


def _read_device_id(request: HttpRequest, user: User) -> str:
    """Return the device ID from the user's cookie; empty without a cookie or after a change of the password."""
    try:
        held: Any = signing.loads(request.COOKIES.get(cookie_name(user), ""), salt=_SALT, max_age=COOKIE_SECONDS)
        device, binding = held
    except (signing.BadSignature, TypeError, ValueError):
        return ""
    return str(device) if constant_time_compare(str(binding), _binding(user, device)) else ""


def _binding(user: User, device: object) -> str:
    return salted_hmac(_SALT, f"{user.pk}:{device}:{user.get_session_auth_hash()}", algorithm="sha256").hexdigest()


class LoginThrottling:
    """Middleware that answers 429 with Retry-After for a rejected attempt and sets device cookies."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        if (wait := getattr(request, _WAIT, 0)) and response.status_code == HTTPStatus.OK:
            response.status_code = HTTPStatus.TOO_MANY_REQUESTS
            response.headers["Retry-After"] = str(wait)
        if (remembered := getattr(request, _REMEMBER, None)) is not None:
            user, device = remembered
            response.set_cookie(
                cookie_name(user),
                signing.dumps([device, _binding(user, device)], salt=_SALT, compress=False),
                max_age=COOKIE_SECONDS,
                path=settings.SESSION_COOKIE_PATH,
                domain=settings.SESSION_COOKIE_DOMAIN,
                secure=settings.SESSION_COOKIE_SECURE,
                httponly=True,
                samesite=cast(Literal["Lax", "Strict", "None"], settings.SESSION_COOKIE_SAMESITE),
            )
        return response
