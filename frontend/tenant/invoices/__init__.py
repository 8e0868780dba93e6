"""A tenant's invoices: the list, each as a document, and what its lines are the sum of."""

from frontend.tenant.invoices.views import urlpatterns

__all__ = ["urlpatterns"]
