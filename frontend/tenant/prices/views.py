"""Prices: the page and its address."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.core.page_context import PageContext, tenant_page
from frontend.core.rendering import show
from frontend.tenant.prices import page


@tenant_page()
def prices(visit: PageContext) -> HttpResponse:
    with visit.scope():
        found = page.prices(visit)
    return show(visit, "prices/page.html", "Prices", prices=found)


urlpatterns = [path("t/<slug:slug>/prices/", prices, name="prices")]
