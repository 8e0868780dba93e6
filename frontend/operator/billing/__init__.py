"""Billing runs: the invoices of each month, from draft to paid."""

from frontend.operator.billing.views import urlpatterns

__all__ = ["urlpatterns"]
