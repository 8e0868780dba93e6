"""Models and workers: replicas and their cordons."""

from frontend.operator.models.views import urlpatterns

__all__ = ["urlpatterns"]
