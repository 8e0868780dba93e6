"""The prices of a tenant."""

from frontend.tenant.prices.views import urlpatterns

__all__ = ["urlpatterns"]
