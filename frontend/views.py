"""The console's pages: who may see them, and which template shows which view model."""

from __future__ import annotations

from django import forms
from django.contrib.auth.decorators import login_required
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from frontend import operators, overview
from frontend.shell import operator_shell, person_shell, signed_in, tenant_shell
from tenants.authentication import Access, accesses
from tenants.models import User
from tenants.scoping import tenant_scope


class EmailLogInForm(AuthenticationForm):
    """Log-in by e-mail address."""

    error_messages = {  # noqa: RUF012 - Django declares it so
        **AuthenticationForm.error_messages,
        "invalid_login": "This e-mail address and password do not match. The password is case-sensitive.",
    }
    username = forms.EmailField(
        label="E-mail address",
        max_length=254,
        widget=forms.EmailInput(attrs={"autocomplete": "username", "autofocus": True}),
    )


class LogIn(LoginView):
    """The log-in page; whoever is logged in already goes on."""

    template_name = "frontend/log_in.html"
    authentication_form = EmailLogInForm
    redirect_authenticated_user = True


@require_safe
@never_cache
@login_required
def home(request: HttpRequest) -> HttpResponse:
    """To the one place there is for this person, or a choice of tenants."""
    user = signed_in(request)
    if user.is_staff:
        return redirect("operator-tenants")
    tenants = [access.tenant for access in accesses(user)]
    if len(tenants) == 1:
        return redirect("overview", tenants[0].slug)
    context = {"shell": person_shell(user, "Your tenants"), "tenants": tenants}
    return render(request, "frontend/choose.html", context)


def tenant_access(user: User, slug: str) -> Access:
    """The person's access to the tenant, which others are not told exists."""
    found = accesses(user, slug)
    if not found:
        raise Http404
    return found[0]


@require_safe
@never_cache
@login_required
def tenant_overview(request: HttpRequest, slug: str) -> HttpResponse:
    user = signed_in(request)
    access = tenant_access(user, slug)
    with tenant_scope(access.tenant):
        page = overview.overview(access.tenant)
    context = {"shell": tenant_shell(user, access, "Overview"), "page": page}
    return render(request, "frontend/overview.html", context)


@require_safe
@never_cache
@login_required
def operator_tenants(request: HttpRequest) -> HttpResponse:
    """Every tenant. That there is such a page is nothing for others to know."""
    user = signed_in(request)
    if not user.is_staff:
        raise Http404
    context = {"shell": operator_shell(user, "Tenants"), "page": operators.tenant_list()}
    return render(request, "frontend/tenants.html", context)
