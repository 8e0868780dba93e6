"""Checks of the password of a signed-in user, which the throttle of sign-in counts."""

from __future__ import annotations

import hashlib
from functools import cache

from django.conf import settings
from django.http import HttpRequest

from inference_worker.contract import valkey
from tenants.login_throttle import Throttle
from tenants.models import User


@cache
def throttle() -> Throttle:
    """Return the throttle of this process."""
    return Throttle(valkey.connect(settings.MILLRACE.valkey_url, valkey.LOGINS))


def session_device(request: HttpRequest) -> str:
    """Return the ID of the device of an open session, for the throttle."""
    return hashlib.sha256(f"session {request.session.session_key}".encode()).hexdigest()


def is_password_of(user: User, password: str, request: HttpRequest) -> bool:
    """Return whether the password is that of the user, who is signed in.

    Raises:
        Throttled: the attempt must wait. The password was not checked.
    """
    counted = throttle().begin("password", user.email, request.META.get("REMOTE_ADDR", ""), session_device(request))
    is_right = user.check_password(password)
    if is_right:
        counted.succeed()
    return is_right
