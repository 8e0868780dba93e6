"""The log of requests, and the story of each."""

from frontend.screens.requests.views import urlpatterns

__all__ = ["urlpatterns"]
