"""Health: what needs a person now, on the operators' first screen."""

from frontend.operator.health.views import urlpatterns

__all__ = ["urlpatterns"]
