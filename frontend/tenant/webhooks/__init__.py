"""Webhook endpoints of the tenant and their deliveries."""

from frontend.tenant.webhooks.views import urlpatterns

__all__ = ["urlpatterns"]
