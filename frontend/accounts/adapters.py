"""Adapters and forms of django-allauth: invitation-only access, throttling and audit entries."""

from __future__ import annotations

from typing import Any, ClassVar

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.forms import ChangePasswordForm, LoginForm, ResetPasswordForm
from allauth.core import context
from allauth.core.exceptions import ReauthenticationRequired
from allauth.mfa.base.forms import AuthenticateForm, ReauthenticateForm
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.forms import ActivateTOTPForm
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.providers.base.constants import AuthProcess
from django.core.mail import EmailMessage
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from frontend.accounts.change_emails import report_change
from frontend.accounts.identities import check_callback
from frontend.accounts.openid_connect import ProviderProblem, reason_of
from frontend.accounts.throttling import attempt, remember_device
from frontend.accounts.totp_codes import use_code
from frontend.core.languages import lazy_text as _lazy
from tenants.outbox import user_emails
from tenants.outbox.email_rendering import render_email
from tenants.reauthentication import reauthentication_route, recently_authenticated
from tenants.site_urls import is_site_url


class AccountAdapter(DefaultAccountAdapter):
    """Sign-in by password. There is no self-service sign-up."""

    error_messages: ClassVar = {
        **DefaultAccountAdapter.error_messages,
        "email_password_mismatch": _lazy("Email address and password do not match. Passwords are case-sensitive."),
    }

    def authenticate(self, request: HttpRequest, **credentials: Any) -> Any:
        """Check a password at sign-in and re-authentication, unless the throttle rejects the attempt."""
        with attempt(request, "password", str(credentials.get("email", ""))) as counted:
            user = super().authenticate(request, **credentials)
            if user is not None:
                counted.succeed()
        return user

    def post_login(self, request: HttpRequest, user: Any, **kwargs: Any) -> HttpResponse:
        """Make the device known to the user after all steps of the sign-in."""
        remember_device(request, user)
        response: HttpResponse = super().post_login(request, user, **kwargs)
        return response

    def set_password(self, user: Any, password: str) -> None:
        """Set the password. The device of a signed-in user stays known, under a new id."""
        super().set_password(user, password)
        request = context.request
        if request.user.is_authenticated and request.user.pk == user.pk:
            remember_device(request, user, renew=True)

    def get_reauthentication_methods(self, user: Any) -> list[dict[str, Any]]:
        """Return only codes and passkeys if the user has a second factor, because a password could remove that factor.

        The first one is the default: a passkey if the only codes are recovery codes.
        """
        methods: list[dict[str, Any]] = super().get_reauthentication_methods(user)
        default = reverse(reauthentication_route(user))
        factors = [method for method in methods if method["id"].startswith("mfa_reauthenticate")]
        if not methods:  # the page has the button of the identity provider
            methods = [{"id": "reauthenticate", "description": "", "url": default}]
        return sorted(factors, key=lambda method: method["url"] != default) or methods

    def is_reauthentication_required(self, *, app: str, **kwargs: Any) -> bool:
        """Apply the platform's rule. allauth's own accepts every session of a user without password and second factor.

        Raises:
            ReauthenticationRequired: the user has not authenticated recently.
        """
        if not recently_authenticated(context.request):
            raise ReauthenticationRequired
        return False

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def is_safe_url(self, url: str | None) -> bool:
        """Return whether `next` can be the target of a redirect."""
        return url is not None and is_site_url(url)

    def send_notification_mail(
        self, template_prefix: str, user: Any, context: dict[str, Any] | None = None, email: str | None = None
    ) -> None:
        """Write an audit entry for each change of a password, second factor or identity, and email the user."""
        change = template_prefix.rpartition("/")[2].replace("webauthn", "passkey")
        identity = (context or {}).get("account")
        after = {"provider": identity.provider, "uid": identity.uid} if identity else None
        report_change(self.request, user, change, after)

    def render_mail(
        self, template_prefix: str, email: Any, context: dict[str, Any], headers: dict[str, str] | None = None
    ) -> EmailMessage:
        """Render an email of allauth in the style of all emails."""
        plain = super().render_mail(template_prefix, email, context, headers)
        return render_email(
            plain.subject,
            plain.body,
            plain.to,
            reason="You receive this email because you have a Millrace account.",
            headers=plain.extra_headers,
        )

    def get_client_ip(self, request: HttpRequest) -> str:
        """Return the client's address as set by the ASGI server, from X-Forwarded-For behind a trusted proxy."""
        return str(request.META.get("REMOTE_ADDR", ""))


class SocialAccountAdapter(DefaultSocialAccountAdapter):
    """Sign-in by OpenID Connect for users whose verified email address is known."""

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        check_callback(request, sociallogin)

    def is_open_for_signup(self, request: HttpRequest, sociallogin: Any) -> bool:
        return False

    def authenticate_by_email(self, sociallogin: Any) -> tuple[Any, str] | None:
        """Return the user of a verified address, whose account is then linked.

        Raises:
            ProviderProblem: the user is an operator. A provider's claim does not open the operator console.
        """
        found: tuple[Any, str] | None = super().authenticate_by_email(sociallogin)
        if found is None or not (found[0].is_staff or found[0].is_superuser):
            return found
        if sociallogin.state.get("process") == AuthProcess.CONNECT:
            return None  # to the signed-in user
        raise ProviderProblem(
            _("Operators are not linked by their email address. Sign in with your password or a passkey.")
        )

    def on_authentication_error(
        self,
        request: HttpRequest,
        provider: Any,
        error: Any = None,
        exception: Exception | None = None,
        extra_context: dict[str, Any] | None = None,
    ) -> None:
        """Add the reason to the page of a failed sign-in."""
        if extra_context is not None:
            extra_context["reason"] = reason_of(exception, request.GET.get("error", ""))


class LogInForm(LoginForm):
    """Sign-in by email address."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        address = self.fields["login"]
        address.label = _("Email address")
        address.widget.attrs |= {"autocomplete": "username", "autofocus": True}
        for field in self.fields.values():
            field.widget.attrs.pop("placeholder", None)  # the label says it
        self.fields["password"].help_text = ""  # allauth's link to the password reset; login.html has one


class _Code:
    """A form with a code of the second factor, which the throttle counts as a step of its own."""

    user: Any

    def clean_code(self) -> str:
        with attempt(context.request, "code", self.user.email) as counted:
            code: str = super().clean_code()  # type: ignore[misc]  # of the form this is mixed into
            counted.succeed()
        return code


class _SingleUseCode(_Code):
    """A form with a code of an enrolled device or a recovery code."""

    authenticator: Authenticator

    def clean_code(self) -> str:
        code = super().clean_code()
        if self.authenticator.type == Authenticator.Type.TOTP:
            use_code(self.authenticator, code)
        return code


class EnterCode(_SingleUseCode, AuthenticateForm):
    """The second step of a sign-in."""


class EnterCodeAgain(_SingleUseCode, ReauthenticateForm):
    """Re-authentication with a code."""


class AdaptersActivateTotp(_Code, ActivateTOTPForm):
    """The first code of a new authenticator app."""


class ChangePassword(ChangePasswordForm):
    """Change of a password, which first checks the old one."""

    def clean_oldpassword(self) -> str:
        with attempt(context.request, "password", self.user.email) as counted:
            old: str = super().clean_oldpassword()
            counted.succeed()
        return old


class ResetPassword(ResetPasswordForm):
    """Request for a link by email. Each request counts, also for addresses without a user."""

    def clean_email(self) -> str:
        with attempt(context.request, "reset", self.cleaned_data["email"]):
            email: str = super().clean_email()
        return email

    def save(self, request: HttpRequest, **kwargs: Any) -> str:
        """Queue the email, also for an address without a user, which receives none."""
        email: str = self.cleaned_data["email"]
        user_emails.queue_password_reset_email(email)
        return email
