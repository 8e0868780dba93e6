"""What every answer of the console and the management API goes through."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse

from tenants.audit import Actor, actor_context
from tenants.models import User


class SecurityHeaders:
    """Adds the content security policy and its kin; a view may set its own, stricter or not, and it stays."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        for name, value in settings.SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response


class Acting:
    """Says to the audit log from where, and as far as the session tells by whom, things are changed.

    The answer carries the request's id, which the log's entries carry too.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        actor = Actor(name="anonymous", ip_address=request.META.get("REMOTE_ADDR"), request_id=f"req_{uuid4().hex}")
        if isinstance(request.user, User):
            actor = actor.as_user(request.user)
        with actor_context(actor):
            response = self.get_response(request)
        response.headers.setdefault("x-request-id", actor.request_id)
        return response


class WholeStaticFiles:
    """Reads WhiteNoise's files at once: its answers are synchronous streams, which ASGI serves badly.

    The files are our own and small.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        if not isinstance(response, StreamingHttpResponse) or not request.path_info.startswith(settings.STATIC_URL):
            return response
        whole = HttpResponse(response.getvalue(), status=response.status_code)
        whole.headers = response.headers
        response.close()
        return whole
