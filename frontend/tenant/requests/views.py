"""Requests: the page, its panels, and the drawer of one."""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.urls import path

from frontend.core.date_ranges import span_of
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import show
from frontend.tenant.requests import detail, log
from tenants.permissions import Permission

NEEDS = Permission.USAGE_READ
PANELS = Panels(
    "requests-panel",
    (
        Panel("stats", "Key figures", "requests/stats.html", log.figures),
        Panel("log", "Requests", "requests/log.html", log.log),
    ),
)


@tenant_page(NEEDS)
def requests(visit: PageContext) -> HttpResponse:
    with visit.scope():
        fields = log.fields(visit)
    return show(visit, "requests/page.html", "Requests", panels=PANELS, span=span_of(visit), fields=fields)


@tenant_page(NEEDS)
def request(visit: PageContext) -> HttpResponse:
    with visit.scope():
        told = detail.told(visit, visit.arguments["name"])
    if told is None:
        raise Http404
    breadcrumbs = (Breadcrumb("Requests", visit.url("requests")),)
    return show(visit, "requests/detail.html", "Request", breadcrumbs=breadcrumbs, told=told)


urlpatterns = [
    path("t/<slug:slug>/requests/", requests, name="requests"),
    PANELS.tenant_url("t/<slug:slug>/requests/", NEEDS),
    path("t/<slug:slug>/requests/<str:name>", request, name="requests-detail"),
]
