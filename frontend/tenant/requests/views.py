"""Requests: the page, its panels, and the drawer of one request."""

from __future__ import annotations

from dataclasses import replace

from django.http import Http404, HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.date_ranges import date_range_of
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.lists import changed_url
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.requests import detail, log
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST

NEEDS = Permission.USAGE_READ
LIVE_SECONDS = 2
STATS = Panel("stats", _lazy("Key figures"), "requests/page.html#stats", log.stats, lazy=True)
HISTOGRAM = Panel(
    "histogram", _lazy("Requests over time"), "requests/page.html#histogram", log.histogram, every=60, lazy=True
)
LOG = Panel("log", _lazy("Requests"), "requests/page.html#log", log.log)
PANELS = Panels("requests-panel", (STATS, HISTOGRAM, LOG))
LIVE_PANELS = Panels(PANELS.route, (STATS, HISTOGRAM, replace(LOG, every=LIVE_SECONDS)))


@tenant_page(NEEDS, cost=PAGE_COST)
def requests(ctx: PageContext) -> HttpResponse:
    is_live = ctx.query.get("live") == "on"
    with ctx.scope():
        context = {"filters": log.filters(ctx), **log.TOOLS.page(ctx)}
    return render_page(
        ctx,
        "requests/page.html",
        _("Requests"),
        panels=LIVE_PANELS if is_live else PANELS,
        is_live=is_live,
        live_url=changed_url(ctx, ctx.url("requests"), live="" if is_live else "on"),
        date_range=date_range_of(ctx),
        compares=log.compares(ctx),
        compare_url=changed_url(ctx, ctx.url("requests"), compare="" if log.compares(ctx) else "previous"),
        **context,
    )


@tenant_page(NEEDS)
def request(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        details = detail.request_detail(ctx, ctx.arguments["name"])
    if details is None:
        raise Http404
    breadcrumbs = (Breadcrumb(_("Requests"), ctx.url("requests")),)
    return render_page(ctx, "requests/detail.html", _("Request"), breadcrumbs=breadcrumbs, **details)


SCREEN = ConsoleScreen(
    "requests",
    _lazy("Requests"),
    icon="requests",
    letter="q",
    group="build",
    order=60,
    needs=Permission.USAGE_READ,
    finders={_lazy("Requests"): log.find_requests},
)
urlpatterns = [
    path("t/<slug:slug>/requests/", requests, name="requests"),
    *log.TOOLS.tenant_urls("t/<slug:slug>/requests/", NEEDS),
    PANELS.tenant_url("t/<slug:slug>/requests/", NEEDS, cost=PAGE_COST),
    path("t/<slug:slug>/requests/<str:name>", request, name="requests-detail"),
]
