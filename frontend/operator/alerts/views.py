"""Alerts for operators: the page and its two lists."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.alerts import page, rules

HEALTH = Panels(
    "operator-alerts-panel",
    (Panel("events", _lazy("Health"), "operator/alerts/page.html#events", page.events, every=30),),
)
BUDGETS = Panels(
    "operator-alerts-budgets",
    (Panel("alerts", _lazy("Budgets"), "operator/alerts/page.html#alerts", page.alerts, every=60),),
)


@operator_page()
def alerts(ctx: PageContext) -> HttpResponse:
    query = page.query_of(ctx)
    panels = {"budgets": BUDGETS, "rules": rules.PANELS}.get(query["show"], HEALTH)
    return render_page(ctx, "operator/alerts/page.html", _("Alerts"), panels=panels, query=query)


SCREEN = ConsoleScreen("operator-alerts", _lazy("Alerts"), icon="alerts", letter="l", group="governance", order=10)
urlpatterns = [
    path("operator/alerts/", alerts, name="operator-alerts"),
    HEALTH.operator_url("operator/alerts/"),
    BUDGETS.operator_url("operator/alerts/budgets/"),
    *rules.urlpatterns,
]
