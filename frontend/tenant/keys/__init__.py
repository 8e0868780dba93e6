"""API keys and the projects they belong to: what each may do, what bounds it, what it costs."""

from frontend.tenant.keys.views import urlpatterns

__all__ = ["urlpatterns"]
