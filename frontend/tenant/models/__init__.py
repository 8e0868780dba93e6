"""The models that a tenant can request."""

from frontend.tenant.models.views import urlpatterns

__all__ = ["urlpatterns"]
