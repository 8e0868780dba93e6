"""A tenant's overview: spend, cache, tokens, speed, faults, keys."""

from frontend.screens.overview.views import urlpatterns

__all__ = ["urlpatterns"]
