"""Whether the person at the keyboard has lately proved to be the one who logged in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from allauth.account.authentication import get_authentication_records
from allauth.mfa.models import Authenticator
from django.conf import settings

if TYPE_CHECKING:
    from django.http import HttpRequest
    from rest_framework.request import Request

    from tenants.models import User


def has_totp(user: User) -> bool:
    """Whether the person has enrolled a second factor."""
    return bool(Authenticator.objects.filter(user=user, type=Authenticator.Type.TOTP).exists())


def recently_authenticated(request: HttpRequest | Request) -> bool:
    """Whether they entered their code, or, as long as they have enrolled none, their password, in the last minutes.

    Money and keys ask this: a browser left open, or a stolen cookie, must not be enough.
    """
    http: Any = getattr(request, "_request", request)
    records = get_authentication_records(http, http.user)
    if has_totp(http.user):
        records = [record for record in records if record.get("method") == "mfa"]
    since = time.time() - settings.ACCOUNT_REAUTHENTICATION_TIMEOUT
    return any(record["at"] >= since for record in records)
