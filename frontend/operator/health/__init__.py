"""Health issues, on the first screen of operators."""

from frontend.operator.health.views import urlpatterns

__all__ = ["urlpatterns"]
