"""A tenant's overview: spend, cache, tokens, speed, faults, keys."""

from frontend.tenant.overview.views import urlpatterns

__all__ = ["urlpatterns"]
