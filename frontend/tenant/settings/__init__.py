"""What the tenant is called, what is kept of its requests, what its invoices say of it, and its end."""

from frontend.tenant.settings.views import urlpatterns

__all__ = ["urlpatterns"]
