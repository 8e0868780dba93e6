"""The throttle of wrong API keys that the gateway and the management API of one process share."""

from __future__ import annotations

from functools import cache

from django.conf import settings

from tenants.keys.wrong_keys import WrongKeyThrottle


@cache
def process_throttle() -> WrongKeyThrottle:
    """Return the throttle of this process."""
    return WrongKeyThrottle(settings.MILLRACE.wrong_keys_per_minute)
