"""Members of the tenant, their roles, and invitations."""

from frontend.tenant.members.views import urlpatterns

__all__ = ["urlpatterns"]
