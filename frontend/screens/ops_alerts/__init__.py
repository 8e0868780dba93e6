"""Alerts: what needed a person, and what budgets warned of."""

from frontend.screens.ops_alerts.views import urlpatterns

__all__ = ["urlpatterns"]
