"""The tenant's audit log."""

from frontend.tenant.audit.views import urlpatterns

__all__ = ["urlpatterns"]
