"""The overview: its page, its panels, its addresses."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.panels import Panel, Panels
from frontend.screens.overview import page
from frontend.showing import show
from frontend.visits import Visit, tenant_page
from tenants.access import Permission

PANELS = Panels(
    "overview-panel",
    (
        Panel("spend", "Spend this month", "overview/spend.html", page.spend),
        Panel("cache", "Prompt-cache saving", "overview/cache.html", page.cache, every=60),
        Panel("tokens", "Tokens by kind", "overview/tokens.html", page.tokens, every=60),
        Panel("keys", "Top API keys by spend", "overview/keys.html", page.keys, needs=Permission.KEYS_READ),
    ),
)


@tenant_page(Permission.USAGE_READ)
def overview(visit: Visit) -> HttpResponse:
    with visit.scope():
        head = page.head(visit)
    if head.first_request:
        return show(visit, "overview/first_request.html", "Overview", head=head)
    return show(visit, "overview/page.html", "Overview", panels=PANELS, head=head)


urlpatterns = [
    path("t/<slug:slug>/", overview, name="overview"),
    PANELS.tenant_url("t/<slug:slug>/", Permission.USAGE_READ),
]
