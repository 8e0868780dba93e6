"""Emails to users about operators' actions on their logins."""

from __future__ import annotations

import structlog
from django.conf import settings
from django.utils.module_loading import import_string
from kombu.exceptions import OperationalError

from tenants.models import User
from tenants.outbox.email_rendering import render_email

log = structlog.get_logger(__name__)


def queue_second_factor_removed_email(user_id: int) -> None:
    """Queue the email for a web job: a mail server is slow and can be down."""
    app = import_string(settings.CELERY_APP)
    try:
        app.send_task("tenants.send_second_factor_removed_email", [user_id], retry=False)
    except OperationalError as exc:
        log.warning("user_mail_queueing_failed", user=user_id, error=str(exc))


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
    reason = "You receive this email because you have a Millrace account."
    render_email("Two-factor authentication removed", text, [user.email], button="View account", reason=reason).send()
