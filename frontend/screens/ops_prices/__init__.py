"""The price book, for operators."""

from frontend.screens.ops_prices.views import urlpatterns

__all__ = ["urlpatterns"]
