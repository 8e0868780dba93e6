"""Models and workers: what is served, by which replicas, and which of them get work."""

from frontend.operator.models.views import urlpatterns

__all__ = ["urlpatterns"]
