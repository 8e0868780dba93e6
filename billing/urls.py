"""Billing's part of the management API, below /api/."""

from __future__ import annotations

from django.urls import path

from billing.api import urls
from billing.views import UsageEventsView, UsageView

urlpatterns = [
    *urls.urlpatterns,
    path("usage", UsageView.as_view(), name="api-usage"),
    path("usage/events", UsageEventsView.as_view(), name="api-usage-events"),
]
