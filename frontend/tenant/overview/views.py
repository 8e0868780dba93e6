"""The overview: its page, its panels, its addresses."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import show
from frontend.tenant.overview import keys, page, spend, usage
from tenants.permissions import Permission

PANELS = Panels(
    "overview-panel",
    (
        Panel("notices", "Notices", "overview/notices.html", spend.notices),
        Panel("spend", "Spend this month", "overview/spend.html", spend.spend),
        Panel("cache", "Prompt cache savings", "overview/cache.html", usage.cache, every=60),
        Panel("stats", "Key figures", "overview/stats.html", usage.figures),
        Panel("tokens", "Tokens by type", "overview/tokens.html", usage.tokens, every=60),
        Panel("first-token", "Time to first token", "overview/first_token.html", usage.first_token),
        Panel("keys", "Top API keys by spend", "overview/keys.html", keys.keys, needs=Permission.KEYS_READ),
        Panel("batches", "Batch jobs", "overview/batches.html", keys.batches),
    ),
)


@tenant_page(Permission.USAGE_READ)
def overview(visit: PageContext) -> HttpResponse:
    with visit.scope():
        head = page.head(visit)
    if head.first_request:
        return show(visit, "overview/first_request.html", "Overview", head=head)
    return show(visit, "overview/page.html", "Overview", panels=PANELS, head=head)


urlpatterns = [
    path("t/<slug:slug>/", overview, name="overview"),
    PANELS.tenant_url("t/<slug:slug>/", Permission.USAGE_READ),
]
