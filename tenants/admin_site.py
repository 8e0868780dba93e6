"""The site of Django's admin: the only part of the console whose pages see all tenants' rows."""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.conf import settings
from django.contrib.admin import AdminSite
from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.site_urls import is_site_url


class RawAdminSite(AdminSite):
    """Django's admin with the console's pages for sign-in, sign-out and passwords."""

    def admin_view(self, view: Any, cacheable: bool = False) -> Any:
        checked = super().admin_view(view, cacheable)

        @wraps(view)
        def seeing_all(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            with all_tenants_scope(BypassReason.ADMIN):
                response = checked(request, *args, **kwargs)
                render = getattr(response, "render", None)
                return render() if render else response  # inside the scope, because templates query the database

        return seeing_all

    def login(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Redirect to the console's login page, which has the second factor and the throttle."""
        if request.user.is_authenticated and not self.has_permission(request):
            raise Http404  # a redirect to the login page would lead back here
        wanted = request.GET.get("next", "")
        if not is_site_url(wanted):
            wanted = reverse(f"{self.name}:index")
        return redirect_to_login(wanted, settings.LOGIN_URL)

    def logout(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        """Redirect to the console, whose menu signs out."""
        return redirect("home")

    def password_change(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        """Redirect to the console's page, which counts wrong passwords."""
        return redirect("account_change_password")
