"""The tenant's audit log."""

from frontend.screens.audit.views import urlpatterns

__all__ = ["urlpatterns"]
