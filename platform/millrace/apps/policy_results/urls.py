"""URLs of the results of routing policies, below /api/."""

from __future__ import annotations

from django.urls import path

from millrace.apps.policy_results import api

urlpatterns = [
    path("policies/dry-run", api.PolicyDryRunView.as_view(), name="api-policy-dry-run"),
    path("policies/shadow-results", api.ShadowResultsView.as_view(), name="api-policy-shadow-results"),
]
