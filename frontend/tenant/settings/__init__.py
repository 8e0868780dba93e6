"""Settings of the tenant: name, data retention, billing profile and deletion."""

from frontend.tenant.settings.views import urlpatterns

__all__ = ["urlpatterns"]
