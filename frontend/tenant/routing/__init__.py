"""Model aliases: routing policies, their versions, and dry runs of changes."""

from frontend.tenant.routing.views import urlpatterns

__all__ = ["urlpatterns"]
