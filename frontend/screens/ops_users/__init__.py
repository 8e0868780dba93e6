"""All users, for operators."""

from frontend.screens.ops_users.views import urlpatterns

__all__ = ["urlpatterns"]
