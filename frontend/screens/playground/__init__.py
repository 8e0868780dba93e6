"""The playground: several models asked at once, over the gateway's WebSocket."""

from frontend.screens.playground.views import urlpatterns

__all__ = ["urlpatterns"]
