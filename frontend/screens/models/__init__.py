"""The models that a tenant may ask for."""

from frontend.screens.models.views import urlpatterns

__all__ = ["urlpatterns"]
