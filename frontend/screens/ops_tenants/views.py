"""All tenants: the page."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.screens.ops_tenants.page import tenant_list
from frontend.showing import show
from frontend.visits import Visit, operator_page


@operator_page()
def tenants(visit: Visit) -> HttpResponse:
    return show(visit, "ops_tenants/page.html", "Tenants", page=tenant_list(visit.now))


urlpatterns = [path("ops/tenants/", tenants, name="ops-tenants")]
