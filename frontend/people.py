"""How allauth's parts behave here: who may come in, and by which words they are turned away."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.forms import LoginForm
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from django.core.mail import EmailMessage
from django.http import HttpRequest

from tenants import audit
from tenants.letters import letter


class AccountAdapter(DefaultAccountAdapter):
    """Log-in by password. Nobody signs up: people are invited."""

    error_messages: ClassVar = {
        **DefaultAccountAdapter.error_messages,
        "email_password_mismatch": "This e-mail address and password do not match. The password is case-sensitive.",
        "too_many_login_attempts": "Too many failed log-ins. Try again in a few minutes.",
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def send_notification_mail(
        self, template_prefix: str, user: Any, context: dict[str, Any] | None = None, email: str | None = None
    ) -> None:
        """Called for each change of a password or second factor, which is what the audit log wants to know."""
        audit.record_person(f"user.{template_prefix.rpartition('/')[2]}", user)
        super().send_notification_mail(template_prefix, user, context, email)

    def render_mail(
        self, template_prefix: str, email: Any, context: dict[str, Any], headers: dict[str, str] | None = None
    ) -> EmailMessage:
        """In the style of all mails."""
        plain = super().render_mail(template_prefix, email, context, headers)
        link = urlsplit(str(context.get("password_reset_url", "")))
        return letter(
            plain.subject,
            plain.body,
            plain.to,
            button="Set a new password",
            home=f"{link.scheme}://{link.netloc}" if link.netloc else "",
            why="You get this because of your log-in at Millrace.",
            headers=plain.extra_headers,
        )

    def get_client_ip(self, request: HttpRequest) -> str:
        """The ASGI server has put the address there, from X-Forwarded-For if the proxy is a trusted one."""
        return str(request.META.get("REMOTE_ADDR", ""))


class SocialAccountAdapter(DefaultSocialAccountAdapter):
    """Log-in by OpenID Connect, for people who are known by their verified address already."""

    def is_open_for_signup(self, request: HttpRequest, sociallogin: Any) -> bool:
        return False


class LogInForm(LoginForm):
    """Log-in by e-mail address, in the console's words."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        address = self.fields["login"]
        address.label = "E-mail address"
        address.widget.attrs |= {"autocomplete": "username", "autofocus": True}
        for field in self.fields.values():
            field.widget.attrs.pop("placeholder", None)  # the label says it
