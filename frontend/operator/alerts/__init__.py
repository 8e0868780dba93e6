"""Alerts: health issues and budget alerts of all tenants."""

from frontend.operator.alerts.views import urlpatterns

__all__ = ["urlpatterns"]
