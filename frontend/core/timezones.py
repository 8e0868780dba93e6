"""In which time zone a person reads times: UTC, as they are kept and billed, or that of their browser."""

from __future__ import annotations

from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.http import HttpRequest

COOKIE = "zone"


def zone_named(name: str) -> tzinfo | None:
    """Return the zone of that IANA name; None: there is none."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def zone_of(request: HttpRequest) -> tzinfo:
    """Return what the person chose; UTC if they did not."""
    return zone_named(request.COOKIES.get(COOKIE, "UTC")) or UTC


def label(zone: tzinfo) -> str:
    """UTC, or the IANA name."""
    return "UTC" if zone is UTC else str(zone)
