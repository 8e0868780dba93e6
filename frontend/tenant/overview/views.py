"""The overview: its page, panels and URLs."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.overview import keys, page, quick_start, spend, usage
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST

CHECKLIST = Panel("checklist", _lazy("First steps"), "overview/page.html#checklist", quick_start.checklist, every=5)
PANELS = Panels(
    "overview-panel",
    (
        Panel("notices", _lazy("Notices"), "overview/page.html#notices", spend.notices),
        CHECKLIST,
        Panel("spend", _lazy("Spend this month"), "overview/page.html#spend", spend.spend),
        Panel("cache", _lazy("Prompt cache savings"), "overview/page.html#cache", usage.cache, every=60),
        Panel("stats", _lazy("Key figures"), "overview/page.html#stats", usage.stats),
        Panel("tokens", _lazy("Tokens by type"), "overview/page.html#tokens", usage.tokens, every=60),
        Panel(
            *("first-token", _lazy("Time to first token"), "overview/page.html#first_token", usage.first_token),
            lazy=True,  # for the size of the page
        ),
        Panel(
            "keys",
            _lazy("Top API keys by spend"),
            "overview/page.html#keys",
            keys.keys,
            lazy=keys.has_many_keys,
            needs=Permission.KEYS_READ,
        ),
        Panel("batches", _lazy("Batch jobs"), "overview/page.html#batches", keys.batches),
    ),
)
# Without usage, the page has only this panel. Its URL is that of PANELS.
FIRST_PANELS = Panels(PANELS.route, (CHECKLIST,))


@tenant_page(Permission.USAGE_READ, cost=PAGE_COST)
def overview(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        header = page.header(ctx)
    if header["code_examples"]:
        return render_page(ctx, "overview/page.html#first_request", _("Overview"), panels=FIRST_PANELS, **header)
    return render_page(ctx, "overview/page.html", _("Overview"), panels=PANELS, **header)


SCREEN = ConsoleScreen("overview", _lazy("Overview"), icon="overview", letter="o", group="top", order=10)
urlpatterns = [
    path("t/<slug:slug>/", overview, name="overview"),
    PANELS.tenant_url("t/<slug:slug>/", Permission.USAGE_READ, cost=PAGE_COST),
]
