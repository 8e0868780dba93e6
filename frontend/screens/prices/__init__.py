"""What a tenant pays."""

from frontend.screens.prices.views import urlpatterns

__all__ = ["urlpatterns"]
