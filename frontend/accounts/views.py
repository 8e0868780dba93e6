"""Pages without a tenant: sign-in, invitation, account and the list of organizations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allauth.account.internal.flows.login import perform_password_login
from allauth.account.models import Login
from allauth.account.utils import get_next_redirect_url
from allauth.account.views import LoginView, ReauthenticateView
from allauth.mfa.models import Authenticator
from allauth.mfa.webauthn.internal.flows import perform_passwordless_login
from allauth.mfa.webauthn.views import LoginWebAuthnView
from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.password_validation import validate_password
from django.contrib.auth.views import LogoutView
from django.db import IntegrityError, transaction
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.middleware.csrf import get_token
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from frontend.accounts import sessions
from frontend.accounts.identities import REAUTHENTICATE, allow_provider, has_identity
from frontend.accounts.passkeys import relying_party_id
from frontend.core import impersonation
from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import signed_in_user, user_layout
from frontend.core.timezones import zone_of
from millrace.apps.alerts.checks import ROLES as ALERT_ROLES
from tenants import actions, audit, invitations
from tenants.authentication import accesses
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Invitation, Membership, Tenant, User
from tenants.site_urls import is_site_url


class LogIn(LoginView):
    """The sign-in page. A user who is already signed in is redirected."""

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        chosen = settings.MILLRACE
        sso = {"sso": bool(chosen.oidc_issuer), "sso_name": chosen.oidc_name, "passkeys": bool(relying_party_id())}
        return {**super().get_context_data(**kwargs), **sso}

    def render_to_response(self, context: dict[str, Any], **kwargs: Any) -> HttpResponse:
        return allow_provider(super().render_to_response(context, **kwargs))


class LogInWithPasskey(LoginWebAuthnView):
    """Sign-in without password, to the page that was requested. An error is shown on the sign-in page."""

    def form_valid(self, form: forms.Form) -> HttpResponse:
        passkey = form.cleaned_data["credential"]
        made = Login(user=passkey.user, redirect_url=get_next_redirect_url(self.request))
        response: HttpResponse = perform_passwordless_login(self.request, passkey, made)
        return response

    def form_invalid(self, form: forms.Form) -> HttpResponse:
        page = LogIn()
        page.setup(self.request)
        errors = list(form.errors.get("credential", ()))
        context = page.get_context_data(form=page.get_form_class()(request=self.request), passkey_errors=errors)
        response: HttpResponse = page.render_to_response(context)
        return response


class Reauthenticate(ReauthenticateView):
    """Re-authentication by the password, or by a round trip to the identity provider."""

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        user = signed_in_user(self.request)
        shown = {"has_password": user.has_usable_password(), "has_identity": has_identity(user)}
        sso = {"process": REAUTHENTICATE, "sso_name": settings.MILLRACE.oidc_name}
        return {**super().get_context_data(**kwargs), **shown, **sso}

    def render_to_response(self, context: dict[str, Any], **kwargs: Any) -> HttpResponse:
        return allow_provider(super().render_to_response(context, **kwargs))


class LogOut(LogoutView):
    """Sign-out, which also ends an impersonation session."""

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        impersonation.end(request)
        return super().post(request, *args, **kwargs)

    def get_redirect_url(self, *args: Any) -> str:
        """Return the URL of `next`, or an empty text if it is not one of this site."""
        url = super().get_redirect_url(*args)
        return url if is_site_url(url) else ""


class JoinForm(forms.Form):
    """The name and the password of a new user."""

    name = forms.CharField(
        label=_lazy("Your name"), max_length=200, widget=forms.TextInput(attrs={"autocomplete": "name"})
    )
    password = forms.CharField(
        label=_lazy("Password"), max_length=128, widget=forms.PasswordInput(attrs={"autocomplete": "new-password"})
    )

    def __init__(self, email: str, data: Any = None) -> None:
        super().__init__(data)
        self._email = email

    def clean_password(self) -> str:
        password: str = self.cleaned_data["password"]
        validate_password(password, User(email=self._email, name=self.cleaned_data.get("name", "")))
        return password


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Accept an invitation as the signed-in user, after sign-in, or as a new user."""
    found = invitations.find(token)
    if found is None:
        raise Http404
    user = request.user if isinstance(request.user, User) else None
    known = User.objects.filter(email__iexact=found.email).exists()
    sent = request.POST if request.method == "POST" else None
    form = JoinForm(found.email, sent) if user is None and not known else None
    refused = ""
    if request.method == "POST" and found.is_open and (user is not None or (form is not None and form.is_valid())):
        try:
            with transaction.atomic():
                user = user or _newcomer(found, form)
                actions.do_accept_invitation(found, user)
        except actions.ActionRefused as exc:
            found = invitations.find(token) or found
            refused = translate_message(exc) if found.is_open else ""  # else the page says that it was used
        else:
            if form is not None:  # a new user, who set the password in this form
                made = Login(user=user, redirect_url=reverse("overview", args=[found.tenant.slug]))
                signed_in_response: HttpResponse = perform_password_login(request, {"email": user.email}, made)
                return signed_in_response
            return redirect("overview", found.tenant.slug)
    if found.is_open and user is None and known:
        return redirect(f"{reverse('account_login')}?{urlencode({'next': request.path})}")
    return render(request, "frontend/invitation.html", {"invitation": found, "form": form, "refused": refused})


def _newcomer(found: Invitation, form: JoinForm | None) -> User:
    """Create the user of an invitation.

    Raises:
        Conflict: another request has just created the user.
    """
    assert form is not None  # noqa: S101  (the caller's condition)
    audit.set_actor(replace(audit.current_actor(), name=found.email))
    try:
        with transaction.atomic():
            user = User.objects.create_user(found.email, form.cleaned_data["password"], name=form.cleaned_data["name"])
    except IntegrityError as exc:
        text = _("An account with this email address was created at the same time. Open the link again to sign in.")
        raise actions.Conflict(text) from exc
    audit.record_person("user.created", user, after=audit.serialize_for_audit(user))
    return user


class ProfileForm(forms.Form):
    """The name of a user."""

    name = forms.CharField(label=_lazy("Name"), max_length=200, widget=forms.TextInput(attrs={"autocomplete": "name"}))


@never_cache
@require_safe
@login_required
def signed_in(request: HttpRequest) -> HttpResponse:
    """Return who is signed in, and the CSRF token of the session, for the script that asked the user to sign in."""
    found = {"user": signed_in_user(request).email, "token": get_token(request)}
    return JsonResponse(found, headers={"X-Signed-In": "true"})


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def account(request: HttpRequest) -> HttpResponse:
    """Show the user's account. A submitted form changes the name."""
    user = signed_in_user(request)
    form = ProfileForm(request.POST if request.method == "POST" else None, initial={"name": user.name})
    if request.method == "POST" and form.is_valid():
        actions.do_rename_user(user, form.cleaned_data["name"])
        return _account_changed(request, _("Name saved."))
    factors = list(Authenticator.objects.filter(user=user).values_list("type", flat=True))
    context = {
        "layout": user_layout(request, _("Account"), _tenants(user)),
        "form": form,
        "has_totp": Authenticator.Type.TOTP in factors,
        "passkeys": factors.count(Authenticator.Type.WEBAUTHN),
        "passkeys_available": bool(relying_party_id()),
        "has_password": user.has_usable_password(),
        "sessions": sessions.sessions_of(request, user),
        "memberships": _memberships(user),
    }
    with timezone.override(zone_of(request)):
        return render(request, "frontend/account.html", context, status=422 if form.errors else 200)


@require_POST
@login_required
def end_sessions(request: HttpRequest) -> HttpResponse:
    """Sign out another session, or all others."""
    text = request.POST.get("session", "")
    is_one = text.isascii() and text.isdigit() and len(text) < 19
    ended = sessions.end_sessions(request, signed_in_user(request), int(text) if is_one else None)
    return _account_changed(request, _("Other sessions signed out: %(number)s.") % {"number": ended})


@require_POST
@login_required
def alert_emails(request: HttpRequest) -> HttpResponse:
    """Turn the alert emails of an organization on or off."""
    user = signed_in_user(request)
    found = [access for access in accesses(user) if access.tenant.slug == request.POST.get("tenant")]
    if not found or user.is_staff:
        raise Http404
    is_on = request.POST.get("wanted") == "on"
    try:
        actions.do_set_alert_emails(found[0].tenant, user, wanted=is_on)
    except actions.Conflict as exc:
        raise Http404 from exc
    if is_on:
        return _account_changed(
            request, _("Alerts of %(name)s are sent to you by email.") % {"name": found[0].tenant.name}
        )
    return _account_changed(
        request, _("Alerts of %(name)s are no longer sent to you by email.") % {"name": found[0].tenant.name}
    )


def _account_changed(request: HttpRequest, message: str) -> HttpResponse:
    messages.success(request, message)
    response = redirect("account")
    response.status_code = 303
    return response


def _memberships(user: User) -> list[Membership]:
    """Return the memberships whose role receives alerts by email. Operators have none."""
    if user.is_staff:
        return []
    with all_tenants_scope(BypassReason.PERSON):
        rows = Membership.objects.all_tenants().filter(user=user, role__in=ALERT_ROLES, tenant__purge_after=None)
        found: list[Membership] = list(rows.select_related("tenant").order_by("tenant__name", "pk"))
    return found


@require_safe
@never_cache
@login_required
def home(request: HttpRequest) -> HttpResponse:
    """Redirect to the user's only tenant or to the operator console; otherwise show the list of tenants."""
    user = signed_in_user(request)
    if user.is_staff:
        return redirect("operator-health")
    tenants = _tenants(user)
    if len(tenants) == 1:
        return redirect("overview", tenants[0].slug)
    context = {"layout": user_layout(request, _("Your organizations"), tenants), "tenants": tenants}
    return render(request, "frontend/select_tenant.html", context)


def _tenants(user: User) -> list[Tenant]:
    """Return the tenants that a user is a member of; none for operators, whose list is the operator console."""
    return [] if user.is_staff else [access.tenant for access in accesses(user)]
