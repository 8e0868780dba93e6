"""All users, for operators."""

from frontend.operator.users.views import urlpatterns

__all__ = ["urlpatterns"]
