"""Fleet: utilization of the workers and cost of their tokens."""

from frontend.operator.fleet.views import urlpatterns

__all__ = ["urlpatterns"]
