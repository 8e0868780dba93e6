"""What a tenant pays."""

from frontend.tenant.prices.views import urlpatterns

__all__ = ["urlpatterns"]
