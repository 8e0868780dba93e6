"""Headers that every answer of the console and the management API carries."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase


class SecurityHeaders:
    """Adds the content security policy and its kin; a view may set its own, stricter or not, and it stays."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        for name, value in settings.SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response
