"""Models: the catalog, and how to ask one."""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.urls import path

from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import show
from frontend.tenant.models import page

PANELS = Panels("models-panel", (Panel("catalog", "Models", "models/catalog.html", page.models),))


@tenant_page()
def models(visit: PageContext) -> HttpResponse:
    return show(visit, "models/page.html", "Models", panels=PANELS, prices_url=visit.link("prices"))


@tenant_page()
def one(visit: PageContext) -> HttpResponse:
    found = page.snippets(visit, visit.arguments["model"])
    if found is None:
        raise Http404
    breadcrumbs = (Breadcrumb("Models", visit.url("models")),)
    return show(visit, "models/detail.html", found.model, breadcrumbs=breadcrumbs, snippets=found)


urlpatterns = [
    path("t/<slug:slug>/models/", models, name="models"),
    path("t/<slug:slug>/models/<str:model>", one, name="models-detail"),
    PANELS.tenant_url("t/<slug:slug>/models/"),
]
