"""The cost explorer: the page, its panels, its saved views and its CSV."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.metering.usage import TooManyRows
from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.lists import with_query
from frontend.core.metering import metering
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.saved_views import delete_view, save_view, saved_views
from frontend.tenant.usage import explorer
from frontend.tenant.usage.responses import csv_file, too_many_rows
from millrace.apps.request_log.cost_segments import find_segments
from millrace.apps.request_log.segment_files import segments_csv
from millrace.apps.request_log.segment_jobs import MAX_DIRECT_CELLS, find_export, start_export
from tenants.actions import ActionRefused
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST, REPORT_COST

NEEDS = Permission.USAGE_READ
ROUTE = "usage-explorer"
SAVE, DELETE = f"{ROUTE}-views-save", f"{ROUTE}-views-delete"
PREFIX = "t/<slug:slug>/usage/explorer/"
PANELS = Panels(
    f"{ROUTE}-panel",
    (
        Panel("exports", _lazy("Exports"), "usage/explorer.html#exports", explorer.exports),
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
        context: dict[str, Any] = {
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
            file, name = explorer.query_of(ctx).file, explorer.file_name(ctx)
            if file.count_cells(find_segments(file.query, largest=1).count) > MAX_DIRECT_CELLS:
                return too_many_rows()
            text = segments_csv(file)
    except TooManyRows:
        return too_many_rows()
    return csv_file(name, text)


@tenant_page(NEEDS, methods=("POST",), step_up=False, cost=REPORT_COST)
def start_explorer_export(ctx: PageContext) -> HttpResponse:
    """Start the job that writes the CSV of the page's question."""
    url = with_query(ctx.url(ROUTE), **ctx.query)
    with ctx.scope():
        file, name = explorer.query_of(ctx).file, explorer.file_name(ctx)
    try:
        start_export(ctx.tenant, file, name)
    except ActionRefused as exc:
        return redirect_with_message(ctx, url, translate_message(str(exc)), failed=True)
    return redirect_with_message(ctx, url, _("The export is being prepared. It will be listed below."))


@tenant_page(NEEDS, cost=REPORT_COST)
def explorer_export(ctx: PageContext) -> HttpResponse:
    """Return the CSV that a job has written."""
    with ctx.scope():
        job = find_export(ctx.tenant, ctx.arguments["export"])
    if job is None:
        raise Http404
    return csv_file(job.filename, job.result)


@tenant_page(NEEDS, methods=("POST",), step_up=False)
def save_explorer_view(ctx: PageContext) -> HttpResponse:
    return save_view(ctx, ROUTE)


@tenant_page(NEEDS, methods=("POST",), step_up=False)
def delete_explorer_view(ctx: PageContext) -> HttpResponse:
    return delete_view(ctx, ROUTE)


urlpatterns = [
    path(PREFIX, show_explorer, name=ROUTE),
    path(f"{PREFIX}csv", explorer_csv, name=f"{ROUTE}-csv"),
    path(f"{PREFIX}exports", start_explorer_export, name=f"{ROUTE}-exports"),
    path(f"{PREFIX}exports/<int:export>", explorer_export, name=f"{ROUTE}-export"),
    path(f"{PREFIX}views/save", save_explorer_view, name=SAVE),
    path(f"{PREFIX}views/delete", delete_explorer_view, name=DELETE),
    PANELS.tenant_url(PREFIX, NEEDS, cost=PAGE_COST),
]
