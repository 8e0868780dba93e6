"""The request log, and the details of each request."""

from frontend.tenant.requests.views import urlpatterns

__all__ = ["urlpatterns"]
