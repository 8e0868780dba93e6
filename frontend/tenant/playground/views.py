"""The playground's page, and the tickets its socket opens with."""

from __future__ import annotations

from django.http import HttpResponse, JsonResponse
from django.urls import path

from frontend.core.page_context import PageContext, tenant_page
from frontend.core.rendering import show
from frontend.tenant.playground import page
from tenants import actions
from tenants.permissions import Permission


@tenant_page(Permission.KEYS_WRITE)
def playground(visit: PageContext) -> HttpResponse:
    with visit.scope():
        found = page.playground(visit)
    return show(visit, "playground/page.html", "Playground", page=found)


@tenant_page(Permission.KEYS_WRITE, methods=("POST",), step_up=False)  # what it opens lasts for minutes
def ticket(visit: PageContext) -> HttpResponse:
    """Return a ticket for one key (see `tenants.keys.playground_tokens`)."""
    with visit.scope():
        key = page.usable_key(visit, visit.request.POST.get("key", ""))
    if key is None:
        return JsonResponse(
            {"error": "This key was deleted or has no inference permission. Choose another key."}, status=409
        )
    try:
        return JsonResponse({"ticket": actions.do_create_playground_token(key, visit.user)})
    except actions.Conflict as exc:
        return JsonResponse({"error": str(exc)}, status=409)


urlpatterns = [
    path("t/<slug:slug>/playground/", playground, name="playground"),
    path("t/<slug:slug>/playground/ticket", ticket, name="playground-ticket"),
]
