"""The response to URLs that neither the gateway nor Django serves."""

from __future__ import annotations

from uuid import uuid4

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse

from frontend.core import error_pages
from millrace.gateway.core.errors import unknown_url
from millrace.gateway.protocols.dialects import requested_dialect
from tenants import problems


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Return the 404 page to browsers and problem details below /api.

    Other clients called an unknown URL, probably with a wrong base URL. They get an error in the format of /v1.
    """
    if request.path_info.startswith("/api/"):
        return problems.not_found(request, exception)
    is_browser = "text/html" in request.headers.get("accept", "")
    if is_browser or request.resolver_match is not None:
        return error_pages.not_found(request, exception)
    headers = {name.lower().encode("latin-1"): value.encode("utf-8") for name, value in request.headers.items()}
    error = unknown_url(request.method or "", request.path_info, settings.MILLRACE.base_url)
    body = requested_dialect(request.path_info, headers).body(error, f"req_{uuid4().hex}")
    return JsonResponse(body, status=error.status)
