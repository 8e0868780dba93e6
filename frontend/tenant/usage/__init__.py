"""A tenant's usage: grouped, over time, with what caches saved and what limits refused."""

from frontend.tenant.usage.views import urlpatterns

__all__ = ["urlpatterns"]
