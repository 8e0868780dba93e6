"""What the tenant's own model names stand for: policies, their versions, and what a new one would change."""

from frontend.tenant.routing.views import urlpatterns

__all__ = ["urlpatterns"]
