"""Codes of a second factor."""

from __future__ import annotations

import time

from allauth.mfa import app_settings
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value


def current_code(secret: str) -> str:
    """Return the code that an authenticator shows now."""
    return format_hotp_value(hotp_value(secret, int(time.time()) // app_settings.TOTP_PERIOD))


def next_code(secret: str) -> str:
    """Return the code that an authenticator shows next. It is accepted now, also after the current one was used."""
    return format_hotp_value(hotp_value(secret, int(time.time()) // app_settings.TOTP_PERIOD + 1))
