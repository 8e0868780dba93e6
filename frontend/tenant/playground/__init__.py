"""The playground: several models asked at once, over the gateway's WebSocket."""

from frontend.tenant.playground.views import urlpatterns

__all__ = ["urlpatterns"]
