"""Middleware of the console and the management API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from uuid import uuid4

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse

from tenants import problems
from tenants.audit import Actor, actor_context
from tenants.models import User
from tenants.stored_text import is_storable


class SecurityHeaders:
    """Adds the Content Security Policy and related headers. Headers that a view has set are kept."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        for name, value in settings.SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response


class StorableText:
    """Rejects requests with a text that PostgreSQL cannot store, in the path, the query string, a form or a cookie.

    JSON bodies are checked by the parser of the management API (`tenants.api.views.StrictJSONParser`).
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if not is_storable(request.path_info):
            return problems.not_found(request, Http404())
        for name, texts in _texts(request):
            if not all(map(is_storable, (name, *texts))):
                return problems.unstorable_text(request, name if is_storable(name) else "request")
        return self.get_response(request)


def _texts(request: HttpRequest) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the names and texts of a request's parameters, cookies and form fields, and the names of its files."""
    yield from request.GET.lists()
    yield from ((name, (value,)) for name, value in request.COOKIES.items())
    if request.method == "POST" and not request.path_info.startswith("/api/"):
        yield from request.POST.lists()
        yield from ((name, [file.name or "" for file in files]) for name, files in request.FILES.lists())


class AuditActor:
    """Sets the actor of audit entries: the session's user and the client's address.

    The response has the request ID, which the audit entries also have.
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
    """Turns WhiteNoise's streaming responses into complete ones.

    The streams are synchronous, which ASGI serves inefficiently, and the files are small.
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
