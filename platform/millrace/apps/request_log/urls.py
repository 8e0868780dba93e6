"""URLs of the request log, below /api/."""

from __future__ import annotations

from django.urls import path

from millrace.apps.request_log import api

urlpatterns = [
    path("requests", api.Requests.as_view(), name="api-requests"),
    path("requests/rates", api.RequestRates.as_view(), name="api-requests-rates"),
    path("requests/<str:name>", api.RequestDetail.as_view(), name="api-request"),
]
