"""The price books, for operators."""

from frontend.operator.prices.views import urlpatterns

__all__ = ["urlpatterns"]
