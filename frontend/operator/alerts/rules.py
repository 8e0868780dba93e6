"""Alert rules of the platform: the lists and forms of tenants' rules, on operator pages."""

from __future__ import annotations

from django.urls import path

from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import FORM, operator_page
from frontend.core.panels import Panel, Panels
from frontend.tenant.alerts import rule_views, rules

PANELS = Panels(
    "operator-alerts-rules-panel",
    (
        Panel("rules", _lazy("Alert rules"), "alerts/rules.html", rules.rules, every=30),
        Panel("rule-history", _lazy("Alert history"), "alerts/rule_history.html", rules.history, every=30),
    ),
)

_form = operator_page(methods=FORM, step_up=True)
_change = operator_page(methods=FORM)
urlpatterns = [
    path("operator/alerts/rules/new", _form(rule_views.new_rule), name="operator-alerts-rules-new"),
    path("operator/alerts/rules/<int:alert_rule>/edit", _form(rule_views.edit_rule), name="operator-alerts-rules-edit"),
    path(
        "operator/alerts/rules/<int:alert_rule>/mute", _change(rule_views.mute_rule), name="operator-alerts-rules-mute"
    ),
    path(
        "operator/alerts/rules/<int:alert_rule>/remove",
        _form(rule_views.remove_rule),
        name="operator-alerts-rules-remove",
    ),
    path(
        "operator/alerts/rules/alerts/<int:rule_alert>/acknowledge",
        operator_page(methods=("POST",))(rule_views.acknowledge_alert),
        name="operator-alerts-rules-acknowledge",
    ),
    PANELS.operator_url("operator/alerts/rules/"),
]
