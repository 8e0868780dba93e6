"""Single use of TOTP codes (RFC 6238, section 5.2). Each is valid for three periods, because clocks differ."""

from __future__ import annotations

from allauth.core.internal.cryptokit import compare_user_code
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value, yield_hotp_counters_from_time
from allauth.mfa.utils import decrypt
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils.translation import gettext as _

LAST_COUNTER = "last_counter"  # in the data of an authenticator: the newest period whose code was accepted


def use_code(device: Authenticator, code: str) -> None:
    """Store that a correct code was used, for sign-in, reauthentication or enrollment.

    Raises:
        ValidationError: this code or a later one was used before.
    """
    with transaction.atomic():
        row = Authenticator.objects.select_for_update().filter(pk=device.pk).first()
        if row is not None and (counter := _counter_of(row, code)) > row.data.get(LAST_COUNTER, -1):
            row.data[LAST_COUNTER] = counter
            row.save(update_fields=["data"])
            device.data = row.data
            return
    raise ValidationError(_("This code was already used. Wait for the next one."), code="code_used")


def _counter_of(device: Authenticator, code: str) -> int:
    """Return the newest valid period with this code; -1 if there is none any more."""
    secret = decrypt(device.data["secret"])
    matching = (
        counter
        for counter in yield_hotp_counters_from_time()
        if compare_user_code(actual=code, expected=format_hotp_value(hotp_value(secret, counter)))
    )
    return max(matching, default=-1)
