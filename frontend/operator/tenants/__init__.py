"""All tenants, for operators."""

from frontend.operator.tenants.views import urlpatterns

__all__ = ["urlpatterns"]
