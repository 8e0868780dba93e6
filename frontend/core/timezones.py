"""The time zone in which a user reads times: UTC or that of the browser."""

from __future__ import annotations

from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.http import HttpRequest

COOKIE = "zone"


def zone_named(name: str) -> tzinfo | None:
    """Return the time zone with this IANA name, or None."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def zone_of(request: HttpRequest) -> tzinfo:
    """Return the user's time zone; the default is UTC."""
    return zone_named(request.COOKIES.get(COOKIE, "UTC")) or UTC


def label(zone: tzinfo) -> str:
    """Return "UTC" or the IANA name."""
    return "UTC" if zone is UTC else str(zone)
