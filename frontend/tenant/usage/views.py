"""Usage: the page, its panels and its CSV export."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.metering.usage import TooManyRows
from frontend.core.languages import lazy_text as _lazy
from frontend.core.metering import metering
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.tenant.usage import page
from frontend.tenant.usage.groups import all_rows, groups
from frontend.tenant.usage.query import GROUPS, filters, query_of
from tenants import csv_tables
from tenants.permissions import Permission

NEEDS = Permission.USAGE_READ
PANELS = Panels(
    "usage-panel",
    (
        Panel("stats", _lazy("Key figures"), "usage/stats.html", page.stats),
        Panel("tokens", _lazy("Tokens by type"), "usage/tokens.html", page.tokens, every=60),
        Panel("cost", _lazy("Cost"), "usage/cost.html", page.cost, every=60),
        Panel("groups", _lazy("Usage by group"), "usage/groups.html", groups),
        Panel("caches", _lazy("Cache performance"), "usage/caches.html", page.caches, every=60),
        Panel("layers", _lazy("Cache layers"), "usage/layers.html", page.layers, every=60, lazy=True),
        Panel("rejections", _lazy("Rate limited (429)"), "usage/rejections.html", page.rejections, every=60),
    ),
)
_COLUMNS = ("requests", "failed", "uncached", "cached", "written", "output")
_HEADING = ("requests", "failed_requests", "uncached_tokens", "cached_tokens", "written_tokens", "output_tokens")


@tenant_page(NEEDS)
def usage(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        found = filters(ctx)
    metered = metering(ctx.now)
    return render_page(
        ctx,
        "usage/page.html",
        _("Usage"),
        panels=PANELS,
        filters=found,
        date_range=query_of(ctx).date_range,
        metering=metered,
    )


@tenant_page(NEEDS)
def usage_csv(ctx: PageContext) -> HttpResponse:
    """Return all rows of the table with all digits, for the page's range, grouping and filters."""
    now = query_of(ctx)
    try:
        with ctx.scope():
            rows = all_rows(ctx, now)
    except TooManyRows:
        return HttpResponse(
            "The export would have too many rows. Choose a shorter period.", status=422, content_type="text/plain"
        )
    heading = (GROUPS[now.group].lower().replace(" ", "_"), "detail", *_HEADING, "cost_usd", "saved_usd")
    table = (
        (
            row.name,
            row.detail,
            *(getattr(row, name) for name in _COLUMNS),
            row.cost.exact,
            row.saved.exact,
        )
        for row in rows
    )
    last = now.date_range.last
    answer = HttpResponse(csv_tables.as_csv(heading, table), content_type="text/csv; charset=utf-8")
    name = f"usage-{ctx.tenant.slug}-by-{now.group}-{now.date_range.first}-{last}.csv"
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


urlpatterns = [
    path("t/<slug:slug>/usage/", usage, name="usage"),
    path("t/<slug:slug>/usage/csv", usage_csv, name="usage-csv"),
    PANELS.tenant_url("t/<slug:slug>/usage/", NEEDS),
]
