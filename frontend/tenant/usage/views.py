"""Usage: the page, its panels and its CSV exports, and the URLs of the cost explorer."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.metering.usage import TooManyRows
from frontend.core.languages import in_english
from frontend.core.languages import lazy_text as _lazy
from frontend.core.metering import metering
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.usage import explorer_views, page, warming_views
from frontend.tenant.usage.groups import all_rows, groups, is_by_request
from frontend.tenant.usage.query import GROUPS, filters, query_of
from frontend.tenant.usage.responses import csv_response, too_many_rows
from frontend.tenant.usage.success import COLUMNS as SUCCESS_COLUMNS
from frontend.tenant.usage.success import LABELS, group_of, named_rows, success
from tenants import csv_tables
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST, REPORT_COST

NEEDS = Permission.USAGE_READ
PANELS = Panels(
    "usage-panel",
    (
        Panel("stats", _lazy("Key figures"), "usage/page.html#stats", page.stats),
        Panel("tokens", _lazy("Tokens by type"), "usage/page.html#tokens", page.tokens, every=60),
        Panel("cost", _lazy("Cost"), "usage/page.html#cost", page.cost, every=60),
        Panel("groups", _lazy("Usage by group"), "usage/page.html#groups", groups, lazy=is_by_request),
        Panel("caches", _lazy("Cache performance"), "usage/page.html#caches", page.caches, every=60),
        Panel("layers", _lazy("Cache layers"), "usage/page.html#layers", page.layers, every=60, lazy=True),
        Panel("success", _lazy("Cost per success"), "usage/page.html#success", success, every=60, lazy=True),
        Panel("rejections", _lazy("Rate limited (429)"), "usage/page.html#rejections", page.rejections, every=60),
    ),
)
_COLUMNS = ("requests", "failed", "uncached", "cached", "written", "output")
_HEADING = ("requests", "failed_requests", "uncached_tokens", "cached_tokens", "written_tokens", "output_tokens")


@tenant_page(NEEDS, cost=PAGE_COST)
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


@tenant_page(NEEDS, cost=REPORT_COST)
def usage_csv(ctx: PageContext) -> HttpResponse:
    """Return all rows of the table with all digits, for the page's range, grouping and filters."""
    now = query_of(ctx)
    try:
        with ctx.scope():
            rows = all_rows(ctx, now)
    except TooManyRows:
        return too_many_rows()
    heading = (in_english(GROUPS[now.group]).lower().replace(" ", "_"), "detail", *_HEADING, "cost_usd", "saved_usd")
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
    name = f"usage-{ctx.tenant.slug}-by-{now.group}"
    return csv_response(name, csv_tables.as_csv(heading, table), now.date_range)


@tenant_page(NEEDS, cost=REPORT_COST)
def success_csv(ctx: PageContext) -> HttpResponse:
    """Return all rows of the cost per success with all digits, for the page's range, grouping and filters."""
    try:
        with ctx.scope():
            rows = named_rows(ctx)
    except TooManyRows:
        return too_many_rows()
    group = group_of(ctx)
    heading = (
        in_english(LABELS[group]).lower().replace(" ", "_"),
        *SUCCESS_COLUMNS,
        "cost_usd",
        "cost_per_success_usd",
    )
    table = (
        (
            name,
            *(getattr(row, column) for column in SUCCESS_COLUMNS),
            Money(row.cost_femto).exact,
            "" if row.cost_per_success_femto is None else Money(row.cost_per_success_femto).exact,
        )
        for name, row in rows
    )
    name = f"success-{ctx.tenant.slug}-by-{group}"
    return csv_response(name, csv_tables.as_csv(heading, table), query_of(ctx).date_range)


SCREEN = ConsoleScreen(
    "usage", _lazy("Usage"), icon="usage", letter="u", group="top", order=20, needs=Permission.USAGE_READ
)
urlpatterns = [
    path("t/<slug:slug>/usage/", usage, name="usage"),
    path("t/<slug:slug>/usage/csv", usage_csv, name="usage-csv"),
    path("t/<slug:slug>/usage/success.csv", success_csv, name="usage-success-csv"),
    PANELS.tenant_url("t/<slug:slug>/usage/", NEEDS, cost=PAGE_COST),
    *explorer_views.urlpatterns,
    *warming_views.urlpatterns,
]
