"""Alerts: what needed a person, and what budgets warned of."""

from frontend.operator.alerts.views import urlpatterns

__all__ = ["urlpatterns"]
