"""Prices: the page and its address."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.screens.prices import page
from frontend.showing import show
from frontend.visits import Visit, tenant_page


@tenant_page()
def prices(visit: Visit) -> HttpResponse:
    with visit.scope():
        found = page.prices(visit)
    return show(visit, "prices/page.html", "Prices", prices=found)


urlpatterns = [path("t/<slug:slug>/prices/", prices, name="prices")]
