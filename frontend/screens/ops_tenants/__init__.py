"""All tenants, for operators."""

from frontend.screens.ops_tenants.views import urlpatterns

__all__ = ["urlpatterns"]
