"""What a person chooses for this browser: theme, time zone, keys. Kept in cookies; nobody else needs to know."""

from __future__ import annotations

from urllib.parse import urlsplit

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from frontend.core.timezones import zone_named

_YEAR = 365 * 24 * 3600


def _right(name: str, value: str) -> bool:
    match name:
        case "theme":
            return value in ("light", "dark", "system")
        case "zone":
            return zone_named(value) is not None
        case "letters":
            return value in ("on", "off")
    return False


@require_POST
def preferences(request: HttpRequest) -> HttpResponse:
    """Keep what was chosen, and go back to where that was done."""
    came_from = request.headers.get("referer", "")
    ours = url_has_allowed_host_and_scheme(came_from, {request.get_host()}, require_https=request.is_secure())
    parts = urlsplit(came_from if ours else "/")
    response = HttpResponseRedirect(f"{parts.path}?{parts.query}" if parts.query else parts.path)
    for name in ("theme", "zone", "letters"):
        value = request.POST.get(name, "")
        if _right(name, value):
            # Not HttpOnly: console.js sets the theme itself, so that it changes at once.
            response.set_cookie(name, value, max_age=_YEAR, samesite="Lax", secure=request.is_secure())
    return response
