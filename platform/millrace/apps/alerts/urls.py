"""URLs of alert rules, below /api/."""

from __future__ import annotations

from django.urls import path

from millrace.apps.alerts import api

urlpatterns = [
    path("alert-rules", api.AlertRules.as_view(), name="api-alert-rules"),
    path("alert-rules/<int:pk>", api.AlertRuleDetail.as_view(), name="api-alert-rule"),
    path("rule-alerts", api.RuleAlerts.as_view(), name="api-rule-alerts"),
    path("rule-alerts/<int:pk>/acknowledge", api.RuleAlertAcknowledge.as_view(), name="api-rule-alert-acknowledge"),
]
