"""The playground's page, and the tokens that open its WebSocket."""

from __future__ import annotations

from django.http import HttpResponse, JsonResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.playground import page
from tenants import actions
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST


@tenant_page(Permission.KEYS_WRITE, cost=PAGE_COST)
def playground(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        found = page.playground(ctx)
    return render_page(ctx, "playground/page.html", _("Playground"), page=found)


@tenant_page(Permission.KEYS_WRITE, methods=("POST",), step_up=False)  # the WebSocket stays open for minutes
def token(ctx: PageContext) -> HttpResponse:
    """Return a playground token for one key (see `tenants.keys.playground_tokens`)."""
    with ctx.scope():
        key = page.usable_key(ctx, ctx.request.POST.get("key", ""))
    if key is None:
        return JsonResponse(
            {"error": _("This key was revoked or has no inference permission. Choose another key.")}, status=409
        )
    try:
        return JsonResponse({"playground_token": actions.do_create_playground_token(key, ctx.user)})
    except actions.Conflict as exc:
        return JsonResponse({"error": translate_message(exc)}, status=409)


SCREEN = ConsoleScreen(
    "playground", _lazy("Playground"), icon="playground", letter="p", group="top", order=30, needs=Permission.KEYS_WRITE
)
urlpatterns = [
    path("t/<slug:slug>/playground/", playground, name="playground"),
    path("t/<slug:slug>/playground/token", token, name="playground-token"),
]
