"""Requests: the page, its panels, and the drawer of one request."""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.urls import path

from frontend.core.date_ranges import date_range_of
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.tenant.requests import detail, log
from tenants.permissions import Permission

NEEDS = Permission.USAGE_READ
PANELS = Panels(
    "requests-panel",
    (
        Panel("stats", "Key figures", "requests/stats.html", log.stats),
        Panel("log", "Requests", "requests/log.html", log.log),
    ),
)


@tenant_page(NEEDS)
def requests(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        filters = log.filters(ctx)
    return render_page(
        ctx, "requests/page.html", "Requests", panels=PANELS, date_range=date_range_of(ctx), filters=filters
    )


@tenant_page(NEEDS)
def request(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        details = detail.request_detail(ctx, ctx.arguments["name"])
    if details is None:
        raise Http404
    breadcrumbs = (Breadcrumb("Requests", ctx.url("requests")),)
    return render_page(ctx, "requests/detail.html", "Request", breadcrumbs=breadcrumbs, **details)


urlpatterns = [
    path("t/<slug:slug>/requests/", requests, name="requests"),
    PANELS.tenant_url("t/<slug:slug>/requests/", NEEDS),
    path("t/<slug:slug>/requests/<str:name>", request, name="requests-detail"),
]
