"""Emails to users about their logins. Web jobs send them: a mail server is slow and can be down."""

from __future__ import annotations

import structlog
from allauth.account import app_settings
from allauth.account.utils import user_pk_to_url_str
from django.conf import settings
from django.utils.module_loading import import_string
from kombu.exceptions import OperationalError

from tenants.models import User
from tenants.outbox.email_rendering import render_email

log = structlog.get_logger(__name__)


REASON = "You receive this email because you have a Millrace account."


def queue_user_email(user_id: int, subject: str, text: str, button: str, reason: str) -> None:
    """Queue an email for a web job: a mail server is slow and can be down. The texts have the user's language."""
    _queue("tenants.send_user_email", user_id, subject, text, button, reason)


def send_user_email(user_id: int, subject: str, text: str, button: str, reason: str) -> None:
    """Email the user."""
    user = User.objects.filter(pk=user_id).first()
    if user is not None:
        render_email(subject, text, [user.email], button=button, reason=reason).send()


def queue_operator_set_password_email(user_id: int) -> None:
    """Queue the email about an operator who set a new password of the user."""
    text = (
        "An operator set a new password of your Millrace account. You were signed out on all devices.\n\n"
        "Sign in with the password that you receive from your operator, and change it:\n\n"
        f"{settings.MILLRACE.base_url}/account/\n\n"
        "If you did not request this, contact your operator."
    )
    queue_user_email(user_id, "Password reset", text, "View account", REASON)


def queue_second_factor_removed_email(user_id: int) -> None:
    """Queue the email about an operator who removed the user's second factor."""
    _queue("tenants.send_second_factor_removed_email", user_id)


def queue_password_reset_email(email: str) -> None:
    """Queue the email to an address as entered, which may have no user.

    The job looks up the user, so the time of the response does not show whether there is one.
    """
    _queue("tenants.send_password_reset_email", email)


def _queue(task: str, *arguments: int | str) -> None:
    app = import_string(settings.CELERY_APP)
    try:
        app.send_task(task, list(arguments), retry=False)
    except OperationalError as exc:
        log.warning("user_mail_queueing_failed", task=task, error=str(exc))


def send_second_factor_removed_email(user_id: int) -> None:
    """Email the user that an operator removed the second factor."""
    user = User.objects.filter(pk=user_id).first()
    if user is None:
        return
    text = (
        "An operator removed two-factor authentication and recovery codes from your Millrace account. You were"
        " signed out on all devices.\n\n"
        "Sign in with your password and set up two-factor authentication again:\n\n"
        f"{settings.MILLRACE.base_url}/account/\n\n"
        "If you did not request this, contact your operator and change your password."
    )
    render_email("Two-factor authentication removed", text, [user.email], button="View account", reason=REASON).send()


def send_password_reset_email(email: str) -> None:
    """Email the link that sets a new password, if the address has an active user."""
    user = User.objects.filter(email=email.strip().lower(), is_active=True).first()
    if user is None:
        return
    key = f"{user_pk_to_url_str(user)}-{app_settings.PASSWORD_RESET_TOKEN_GENERATOR().make_token(user)}"
    text = (
        "A password reset was requested for your Millrace account. If you did not request it, ignore this email. Your"
        " password stays the same.\n\n"
        "To set a new password, open this link:\n\n"
        f"{settings.MILLRACE.base_url}/account/password/reset/{key}"
    )
    render_email("Set a new password", text, [user.email], button="Set a new password", reason=REASON).send()
