"""The audit log of all tenants and of the platform itself."""

from frontend.operator.audit.views import urlpatterns

__all__ = ["urlpatterns"]
