"""The overview: its page, panels and URLs."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.tenant.overview import keys, page, quick_start, spend, usage
from tenants.permissions import Permission

CHECKLIST = Panel("checklist", "First steps", "overview/checklist.html", quick_start.checklist, every=5)
PANELS = Panels(
    "overview-panel",
    (
        Panel("notices", "Notices", "overview/notices.html", spend.notices),
        CHECKLIST,
        Panel("spend", "Spend this month", "overview/spend.html", spend.spend),
        Panel("cache", "Prompt cache savings", "overview/cache.html", usage.cache, every=60),
        Panel("stats", "Key figures", "overview/stats.html", usage.stats),
        Panel("tokens", "Tokens by type", "overview/tokens.html", usage.tokens, every=60),
        Panel("first-token", "Time to first token", "overview/first_token.html", usage.first_token),
        Panel("keys", "Top API keys by spend", "overview/keys.html", keys.keys, needs=Permission.KEYS_READ),
        Panel("batches", "Batch jobs", "overview/batches.html", keys.batches),
    ),
)
# Without usage, the page has only this panel. Its URL is that of PANELS.
FIRST_PANELS = Panels(PANELS.route, (CHECKLIST,))


@tenant_page(Permission.USAGE_READ)
def overview(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        header = page.header(ctx)
    if header["code_examples"]:
        return render_page(ctx, "overview/first_request.html", "Overview", panels=FIRST_PANELS, **header)
    return render_page(ctx, "overview/page.html", "Overview", panels=PANELS, **header)


urlpatterns = [
    path("t/<slug:slug>/", overview, name="overview"),
    PANELS.tenant_url("t/<slug:slug>/", Permission.USAGE_READ),
]
