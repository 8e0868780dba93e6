"""Where the tenant's events are sent, and what became of each."""

from frontend.tenant.webhooks.views import urlpatterns

__all__ = ["urlpatterns"]
