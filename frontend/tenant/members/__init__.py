"""Who is in the tenant, what they may do, and who is asked in."""

from frontend.tenant.members.views import urlpatterns

__all__ = ["urlpatterns"]
