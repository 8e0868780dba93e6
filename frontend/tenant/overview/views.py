"""The overview: its page, panels and URLs."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.tenant.overview import keys, page, spend, usage
from tenants.permissions import Permission

PANELS = Panels(
    "overview-panel",
    (
        Panel("notices", "Notices", "overview/notices.html", spend.notices),
        Panel("spend", "Spend this month", "overview/spend.html", spend.spend),
        Panel("cache", "Prompt cache savings", "overview/cache.html", usage.cache, every=60),
        Panel("stats", "Key figures", "overview/stats.html", usage.stats),
        Panel("tokens", "Tokens by type", "overview/tokens.html", usage.tokens, every=60),
        Panel("first-token", "Time to first token", "overview/first_token.html", usage.first_token),
        Panel("keys", "Top API keys by spend", "overview/keys.html", keys.keys, needs=Permission.KEYS_READ),
        Panel("batches", "Batch jobs", "overview/batches.html", keys.batches),
    ),
)


@tenant_page(Permission.USAGE_READ)
def overview(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        header = page.header(ctx)
    if header["first_request"]:
        return render_page(ctx, "overview/first_request.html", "Overview", **header)
    return render_page(ctx, "overview/page.html", "Overview", panels=PANELS, **header)


urlpatterns = [
    path("t/<slug:slug>/", overview, name="overview"),
    PANELS.tenant_url("t/<slug:slug>/", Permission.USAGE_READ),
]
