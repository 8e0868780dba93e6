"""Budgets, quotas and rate limits of the organization, its projects, keys and members."""

from frontend.tenant.budgets.views import urlpatterns

__all__ = ["urlpatterns"]
