"""URLs of the request log, below /api/."""

from __future__ import annotations

from django.urls import path

from millrace.apps.request_log import api, policy_api, warming_api

urlpatterns = [
    path("cache-warming", warming_api.CacheWarming.as_view(), name="api-cache-warming"),
    path("cache-warming/run", warming_api.CacheWarmingRun.as_view(), name="api-cache-warming-run"),
    path("policies/dry-run", policy_api.PolicyDryRunView.as_view(), name="api-policy-dry-run"),
    path("policies/shadow-results", policy_api.ShadowResultsView.as_view(), name="api-policy-shadow-results"),
    path("requests", api.Requests.as_view(), name="api-requests"),
    path("requests/rates", api.RequestRates.as_view(), name="api-requests-rates"),
    path("requests/cache-layers", api.RequestCacheLayers.as_view(), name="api-requests-cache-layers"),
    path("requests/outcomes", api.RequestOutcomes.as_view(), name="api-requests-outcomes"),
    path("requests/success", api.RequestSuccess.as_view(), name="api-requests-success"),
    path("requests/prompt-advice", api.RequestPromptAdvice.as_view(), name="api-requests-prompt-advice"),
    path("requests/<str:name>", api.RequestDetail.as_view(), name="api-request"),
]
