"""URLs of the request log, below /api/."""

from __future__ import annotations

from django.urls import path

from millrace.apps.request_log import api

urlpatterns = [
    path("requests", api.Requests.as_view(), name="api-requests"),
    path("requests/rates", api.RequestRates.as_view(), name="api-requests-rates"),
    path("requests/outcomes", api.RequestOutcomes.as_view(), name="api-requests-outcomes"),
    path("requests/success", api.RequestSuccess.as_view(), name="api-requests-success"),
    path("requests/<str:name>", api.RequestDetail.as_view(), name="api-request"),
]
