"""Where login attempts meet the throttle: the address, the known device, and what the answer says.

A device becomes known to a user when it completes a sign-in: the answer sets a signed cookie, bound to the user and to
the user's password. Changing the password makes all of a user's devices unknown, and gives the device that changed it
a new cookie.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import Any, Literal, cast

import redis
from django.conf import settings
from django.core import signing
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponseBase
from django.utils.crypto import constant_time_compare, salted_hmac

from millrace.conf.environment import platform_settings
from tenants.login_throttle import Attempt, Throttle, Throttled
from tenants.models import User

COOKIE = "device"  # with the user's id behind it: a browser may be used by several users
COOKIE_SECONDS = 400 * 24 * 3600  # the most that browsers accept
_SALT = "frontend.accounts.throttling.device"
_WAIT, _REMEMBER = "_throttle_wait", "_throttle_remember"


@cache
def throttle() -> Throttle:
    """Return this process' throttle."""
    return Throttle(redis.Redis.from_url(platform_settings().valkey_url, socket_timeout=2))


@contextmanager
def attempt(request: HttpRequest, step: str, email: str) -> Iterator[Attempt]:
    """Count an attempt before its secret is checked. The block calls `succeed` if the secret was right.

    Raises:
        ValidationError: the attempt must wait; the message says how long, and so does the answer's Retry-After.
    """
    try:
        counted = throttle().begin(step, email, request.META.get("REMOTE_ADDR", ""), device_of(request, email))
    except Throttled as exc:
        setattr(request, _WAIT, max(exc.seconds, getattr(request, _WAIT, 0)))
        raise ValidationError(
            f"Too many failed attempts. Try again in {in_words(exc.seconds)}.", code="too_many_login_attempts"
        ) from exc
    yield counted


def in_words(seconds: int) -> str:
    """Return a waiting time for people, rounded up."""
    number, unit = (seconds, "second") if seconds < 120 else (-(-seconds // 60), "minute")
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def device_of(request: HttpRequest, email: str) -> str:
    """Return the id of a device that has signed in as this user before: by its cookie, or by its open session."""
    user = User.objects.filter(email=email.strip().lower()).first()
    if user is None:
        return ""
    if found := _known(request, user):
        return found
    if request.user.is_authenticated and request.user.pk == user.pk:
        return hashlib.sha256(f"session {request.session.session_key}".encode()).hexdigest()
    return ""


def remember_device(request: HttpRequest, user: User, *, renew: bool = False) -> None:
    """Have the answer to this request make its device known to the user. `renew`: under a new id."""
    known = "" if renew else _known(request, user)
    setattr(request, _REMEMBER, (user, known or secrets.token_hex(16)))


def cookie_name(user: User) -> str:
    return f"{COOKIE}_{user.pk}"


def _known(request: HttpRequest, user: User) -> str:
    """Return the device's id from the user's cookie; empty if there is none, or if the password has changed since."""
    try:
        held: Any = signing.loads(request.COOKIES.get(cookie_name(user), ""), salt=_SALT, max_age=COOKIE_SECONDS)
        device, binding = held
    except (signing.BadSignature, TypeError, ValueError):
        return ""
    return str(device) if constant_time_compare(str(binding), _binding(user, device)) else ""


def _binding(user: User, device: object) -> str:
    return salted_hmac(_SALT, f"{user.pk}:{device}:{user.get_session_auth_hash()}", algorithm="sha256").hexdigest()


class LoginThrottling:
    """Middleware that completes answers: 429 with Retry-After for a refused attempt, and the cookie of a device."""

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
