"""Usage of a tenant: by group and over time, with cache savings and rejections."""

from frontend.tenant.usage.views import urlpatterns

__all__ = ["urlpatterns"]
