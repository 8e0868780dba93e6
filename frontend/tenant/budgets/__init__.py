"""Budgets, quotas and rate limits: what bounds the account, its projects, keys and members."""

from frontend.tenant.budgets.views import urlpatterns

__all__ = ["urlpatterns"]
