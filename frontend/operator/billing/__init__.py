"""Billing runs: the months' invoices, from draft to paid, and what operators do to them."""

from frontend.operator.billing.views import urlpatterns

__all__ = ["urlpatterns"]
