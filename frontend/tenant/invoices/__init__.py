"""Invoices of a tenant: the list, each document, and the usage behind its lines."""

from frontend.tenant.invoices.views import urlpatterns

__all__ = ["urlpatterns"]
