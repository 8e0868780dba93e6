"""Preferences of a user in this browser: theme, time zone, language, shortcuts and the checklist, stored in cookies."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.views.decorators.http import require_POST

from frontend.core.timezones import zone_named
from tenants.site_urls import site_url_in_header

_YEAR = 365 * 24 * 3600


def _is_valid(name: str, value: str) -> bool:
    match name:
        case "theme":
            return value in ("light", "dark", "system")
        case "zone":
            return zone_named(value) is not None
        case "language":
            return value in dict(settings.LANGUAGES)
        case "letters" | "checklist":
            return value in ("on", "off")
    return False


@require_POST
def preferences(request: HttpRequest) -> HttpResponse:
    """Store the preferences and redirect to the previous page."""
    response = HttpResponseRedirect(site_url_in_header(request, "Referer") or "/")
    for name in ("theme", "zone", "language", "letters", "checklist"):
        value = request.POST.get(name, "")
        if _is_valid(name, value):
            # Not HttpOnly, because console.js changes the theme immediately.
            response.set_cookie(name, value, max_age=_YEAR, samesite="Lax", secure=request.is_secure())
    return response
