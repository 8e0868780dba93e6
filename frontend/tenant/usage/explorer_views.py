"""The cost explorer: the page, its panel, its saved views and its CSV."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.metering.usage import TooManyRows
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.saved_views import delete_view, save_view, saved_views
from frontend.tenant.usage import explorer
from frontend.tenant.usage.responses import csv_response, too_many_rows
from millrace.apps.request_log.segment_files import segments_csv
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST, REPORT_COST

NEEDS = Permission.USAGE_READ
ROUTE = "usage-explorer"
SAVE, DELETE = f"{ROUTE}-views-save", f"{ROUTE}-views-delete"
PREFIX = "t/<slug:slug>/usage/explorer/"
PANELS = Panels(
    f"{ROUTE}-panel",
    (
        Panel(
            *("segments", _lazy("Cost explorer"), "usage/explorer.html#segments", explorer.explorer),
            every=60,
            lazy=explorer.is_by_request,
        ),
    ),
)


@tenant_page(NEEDS, cost=PAGE_COST)
def show_explorer(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = {
            "bar": explorer.filters(ctx),
            "views": saved_views(ctx, ROUTE, explorer.VIEWS, SAVE, DELETE),
            "controls": explorer.controls(ctx),
            "date_range": explorer.query_of(ctx).date_range,
        }
    return render_page(
        ctx,
        "usage/explorer.html",
        _("Cost explorer"),
        panels=PANELS,
        breadcrumbs=(Breadcrumb(_("Usage"), ctx.url("usage")),),
        metering=metering(ctx.now),
        **context,
    )


@tenant_page(NEEDS, cost=REPORT_COST)
def explorer_csv(ctx: PageContext) -> HttpResponse:
    """Return all segments with all digits, for the page's question."""
    try:
        with ctx.scope():
            now = explorer.query_of(ctx)
            text = segments_csv(now.file)
    except TooManyRows:
        return too_many_rows()
    return csv_response(f"{now.asked.measure}-{ctx.tenant.slug}-by-{now.asked.dimension}", text, now.date_range)


@tenant_page(NEEDS, methods=("POST",), step_up=False)
def save_explorer_view(ctx: PageContext) -> HttpResponse:
    return save_view(ctx, ROUTE)


@tenant_page(NEEDS, methods=("POST",), step_up=False)
def delete_explorer_view(ctx: PageContext) -> HttpResponse:
    return delete_view(ctx, ROUTE)


urlpatterns = [
    path(PREFIX, show_explorer, name=ROUTE),
    path(f"{PREFIX}csv", explorer_csv, name=f"{ROUTE}-csv"),
    path(f"{PREFIX}views/save", save_explorer_view, name=SAVE),
    path(f"{PREFIX}views/delete", delete_explorer_view, name=DELETE),
    PANELS.tenant_url(PREFIX, NEEDS, cost=PAGE_COST),
]
