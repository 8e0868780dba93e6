"""Prices: the page and its URL."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.prices import page


@tenant_page()
def prices(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        found = page.prices(ctx)
    return render_page(ctx, "prices/page.html", _("Prices"), prices=found)


SCREEN = ConsoleScreen("prices", _lazy("Prices"), icon="prices", letter="c", group="billing", order=40)
urlpatterns = [path("t/<slug:slug>/prices/", prices, name="prices")]
