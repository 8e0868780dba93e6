"""The playground: requests to several models over the gateway's WebSocket."""

from frontend.tenant.playground.views import urlpatterns

__all__ = ["urlpatterns"]
