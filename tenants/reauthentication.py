"""What a session has proved about its user: the second factor, and a recent re-authentication."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allauth.account.authentication import get_authentication_records
from allauth.mfa.models import Authenticator
from django.conf import settings

if TYPE_CHECKING:
    from django.http import HttpRequest
    from rest_framework.request import Request

    from tenants.models import User


SECOND_FACTORS = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)


def reauthentication_route(user: User) -> str:
    """Return the name of the page that asks for the user's code or passkey.

    Without a second factor, it asks for the password or for a round trip to the identity provider.
    """
    types = set(Authenticator.objects.filter(user=user).values_list("type", flat=True))
    if Authenticator.Type.TOTP in types:
        return "mfa_reauthenticate"
    return "mfa_reauthenticate_webauthn" if Authenticator.Type.WEBAUTHN in types else "account_reauthenticate"


@dataclass(frozen=True)
class Proofs:
    """The authentication records of one session that count for its user.

    Once the user has TOTP or a passkey, only codes and passkeys that the user still has count. A session keeps its
    own records, so a device enrolled in one session proves nothing about another one.
    """

    has_second_factor: bool
    records: tuple[dict[str, Any], ...]

    @property
    def is_second_factor_missing(self) -> bool:
        """Whether the user has a second factor and the session was never completed with it."""
        return self.has_second_factor and not self.records


def proofs_of(request: HttpRequest | Request) -> Proofs:
    """Return what the session of a signed-in user has proved. Costs one query."""
    http: Any = getattr(request, "_request", request)
    records = get_authentication_records(http, http.user)
    types = dict(Authenticator.objects.filter(user=http.user).values_list("pk", "type"))
    if not set(SECOND_FACTORS).intersection(types.values()):
        return Proofs(False, tuple(records))
    return Proofs(
        True, tuple(record for record in records if record.get("method") == "mfa" and record.get("id") in types)
    )


def recently_authenticated(request: HttpRequest | Request) -> bool:
    """Return whether the user entered a code or used a passkey in the last minutes.

    Without them, a password or a sign-in through the identity provider counts. Changes of money, keys, users and of the
    user's own ways to sign in require this: an open browser or a stolen cookie must not be enough.
    """
    since = time.time() - settings.ACCOUNT_REAUTHENTICATION_TIMEOUT
    return any(record["at"] >= since for record in proofs_of(request).records)
