"""The log of requests, and the story of each."""

from frontend.tenant.requests.views import urlpatterns

__all__ = ["urlpatterns"]
