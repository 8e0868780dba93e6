"""The models that a tenant may ask for."""

from frontend.tenant.models.views import urlpatterns

__all__ = ["urlpatterns"]
