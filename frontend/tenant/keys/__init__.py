"""API keys and their projects: permissions, limits and cost."""

from frontend.tenant.keys.views import urlpatterns

__all__ = ["urlpatterns"]
