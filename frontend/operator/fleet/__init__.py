"""Fleet: how busy the workers were, and what their tokens cost."""

from frontend.operator.fleet.views import urlpatterns

__all__ = ["urlpatterns"]
