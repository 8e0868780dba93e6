"""The email outbox: emails to members, written in the transaction that causes them and sent by a web job.

An email is sent once, with one exception. If a sender is killed after the mail server accepted the email and before
that was stored, the email is sent again with the same Message-ID.
"""

from __future__ import annotations

import smtplib
from collections.abc import Sequence
from datetime import UTC, datetime

import structlog
from django.conf import settings
from django.core.mail import EmailMessage
from django.db import connection
from django.utils.crypto import salted_hmac

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Membership, OutboxEmail
from tenants.outbox.email_rendering import render_email

log = structlog.get_logger(__name__)
NO_RECIPIENT = "No member has a role that receives this email."
# A claim lasts two minutes, and twice as long after each attempt.
_CLAIM = """
UPDATE tenants_outboxemail SET claimed_at = %(now)s, attempts = attempts + 1
WHERE id = (
    SELECT id FROM tenants_outboxemail WHERE sent_at IS NULL AND attempts < %(max_attempts)s
        AND (claimed_at IS NULL OR claimed_at < %(now)s - interval '2 minutes' * power(2, attempts))
    ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id
"""


def enqueue_email(tenant_id: int, roles: Sequence[str], subject: str, body: str) -> OutboxEmail:
    """Write an email to the members with these roles, in the caller's transaction and scope."""
    return OutboxEmail.objects.create(tenant_id=tenant_id, roles=list(roles), subject=subject[:200], body=body)


def send_emails(now: datetime | None = None) -> int:
    """Send all due emails. Returns the number of sent emails."""
    sent = 0
    while (pk := _claim(now or datetime.now(UTC))) is not None:
        message = _message(pk)
        try:
            if message.to:
                message.send()
        except (OSError, smtplib.SMTPException) as exc:
            log.warning("email_failed", email_id=pk, error=str(exc))
            _update(pk, only_unsent=True, error=error_message(exc))
            continue
        _update(pk, sent_at=datetime.now(UTC), error="" if message.to else NO_RECIPIENT)
        sent += bool(message.to)
    return sent


def error_message(error: OSError | smtplib.SMTPException) -> str:
    """Return the message for the tenant. The mail server's own message can contain host names and logins."""
    match error:
        case smtplib.SMTPRecipientsRefused():
            return "The mail server rejected the recipients."
        case smtplib.SMTPAuthenticationError():
            return "The mail server rejected the platform’s login."
        case smtplib.SMTPResponseException():
            return f"The mail server responded with {error.smtp_code}."
    return "The mail server could not be reached."


def _update(pk: int, *, only_unsent: bool = False, **fields: object) -> None:
    """Update the email's row. With `only_unsent`, not if another process has already sent the email."""
    with all_tenants_scope(BypassReason.WEBHOOKS):
        rows = OutboxEmail.objects.all_tenants().filter(pk=pk)
        (rows.filter(sent_at=None) if only_unsent else rows).update(**fields)


def _claim(now: datetime) -> int | None:
    with all_tenants_scope(BypassReason.WEBHOOKS), connection.cursor() as cursor:
        cursor.execute(_CLAIM, {"now": now, "max_attempts": OutboxEmail.MAX_ATTEMPTS})
        row = cursor.fetchone()
    return None if row is None else int(row[0])


def _message(pk: int) -> EmailMessage:
    with all_tenants_scope(BypassReason.WEBHOOKS):
        email = OutboxEmail.objects.all_tenants().get(pk=pk)
        members = Membership.objects.for_tenant(email.tenant_id).filter(role__in=email.roles)
        to = sorted(members.values_list("user__email", flat=True))
    name = salted_hmac("tenants.outbox.email_outbox", str(pk)).hexdigest()
    domain = settings.DEFAULT_FROM_EMAIL.rpartition("@")[2].rstrip("> ")
    return render_email(email.subject, email.body, to, headers={"Message-ID": f"<{name}@{domain}>"})
