"""URLs of billing in the management API, below /api/."""

from __future__ import annotations

from django.urls import path

from billing.api import prices, urls
from billing.views import UsageEventsView, UsageView

urlpatterns = [
    *urls.urlpatterns,
    path("prices", prices.Prices.as_view(), name="api-prices"),
    path("operator/prices", prices.PriceVersions.as_view(), name="api-operator-prices"),
    path("operator/prices/import", prices.PriceImport.as_view(), name="api-operator-prices-import"),
    path("operator/prices/<int:pk>", prices.PriceVersionOne.as_view(), name="api-operator-prices-detail"),
    path("operator/prices/<int:pk>/preview", prices.PricePreview.as_view(), name="api-operator-prices-preview"),
    *(
        path(
            f"operator/prices/<int:pk>/{action}",
            prices.PriceVersionActionView.as_view(action_name=action),
            name=f"api-operator-prices-{action}",
        )
        for action in prices.ACTIONS
    ),
    path("operator/tenants/<int:pk>/price-book", prices.TenantBook.as_view(), name="api-operator-tenant-price-book"),
    path("usage", UsageView.as_view(), name="api-usage"),
    path("usage/events", UsageEventsView.as_view(), name="api-usage-events"),
]
