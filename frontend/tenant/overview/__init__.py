"""The overview of a tenant: spend, cache, tokens, latency, errors and keys."""

from frontend.tenant.overview.views import urlpatterns

__all__ = ["urlpatterns"]
