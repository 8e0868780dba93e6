"""Models: the catalog, and API examples for a model."""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.models import page

PANELS = Panels("models-panel", (Panel("catalog", _lazy("Models"), "models/page.html#catalog", page.models),))


@tenant_page()
def models(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "models/page.html", _("Models"), panels=PANELS, prices_url=ctx.url("prices"))


@tenant_page()
def model(ctx: PageContext) -> HttpResponse:
    found = page.snippets(ctx, ctx.arguments["model"])
    if found is None:
        raise Http404
    breadcrumbs = (Breadcrumb(_("Models"), ctx.url("models")),)
    return render_page(ctx, "models/detail.html", found.model, breadcrumbs=breadcrumbs, snippets=found)


SCREEN = ConsoleScreen("models", _lazy("Models"), icon="models", letter="d", group="build", order=30)
urlpatterns = [
    path("t/<slug:slug>/models/", models, name="models"),
    path("t/<slug:slug>/models/<str:model>", model, name="models-detail"),
    PANELS.tenant_url("t/<slug:slug>/models/"),
]
