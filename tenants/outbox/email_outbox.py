"""Mails to a tenant's members about their tenant: noted in the transaction of what they tell of, sent by a web job.

Each is sent once, but for one thing that SMTP leaves open: a sender that dies after the server took the mail and before
that was written down. Then it is sent again, with the same Message-ID.
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
from tenants.outbox.email_rendering import letter

log = structlog.get_logger(__name__)
NOBODY = "No member has a role that receives this email."
# The sender that claims an email has some minutes to send it, twice as many after each attempt.
_CLAIM = """
UPDATE tenants_outboxemail SET claimed_at = %(now)s, attempts = attempts + 1
WHERE id = (
    SELECT id FROM tenants_outboxemail WHERE sent_at IS NULL AND attempts < %(max_attempts)s
        AND (claimed_at IS NULL OR claimed_at < %(now)s - interval '2 minutes' * power(2, attempts))
    ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id
"""


def enqueue_email(tenant_id: int, roles: Sequence[str], subject: str, body: str) -> OutboxEmail:
    """Note a mail to the members of these roles, in the caller's transaction and scope."""
    return OutboxEmail.objects.create(tenant_id=tenant_id, roles=list(roles), subject=subject[:200], body=body)


def send_mails(now: datetime | None = None) -> int:
    """Send every mail that is due; gives how many were."""
    sent = 0
    while (pk := _claim(now or datetime.now(UTC))) is not None:
        message = _written(pk)
        try:
            if message.to:
                message.send()
        except (OSError, smtplib.SMTPException) as exc:
            log.warning("mail_failed", mail=pk, error=str(exc))
            _note(pk, only_unsent=True, error=reason(exc))
            continue
        _note(pk, sent_at=datetime.now(UTC), error="" if message.to else NOBODY)
        sent += bool(message.to)
    return sent


def reason(fault: OSError | smtplib.SMTPException) -> str:
    """Return what a tenant may read of it: the server's own message names servers and logins."""
    match fault:
        case smtplib.SMTPRecipientsRefused():
            return "The mail server rejected the recipients."
        case smtplib.SMTPAuthenticationError():
            return "The mail server rejected the platform’s login."
        case smtplib.SMTPResponseException():
            return f"The mail server responded with {fault.smtp_code}."
    return "The mail server could not be reached."


def _note(pk: int, *, only_unsent: bool = False, **fields: object) -> None:
    """`only_unsent`: not if the process that took over the late mail has already sent it."""
    with all_tenants_scope(BypassReason.WEBHOOKS):
        mail = OutboxEmail.objects.all_tenants().filter(pk=pk)
        (mail.filter(sent_at=None) if only_unsent else mail).update(**fields)


def _claim(now: datetime) -> int | None:
    with all_tenants_scope(BypassReason.WEBHOOKS), connection.cursor() as cursor:
        cursor.execute(_CLAIM, {"now": now, "max_attempts": OutboxEmail.MAX_ATTEMPTS})
        row = cursor.fetchone()
    return None if row is None else int(row[0])


def _written(pk: int) -> EmailMessage:
    with all_tenants_scope(BypassReason.WEBHOOKS):
        mail = OutboxEmail.objects.all_tenants().get(pk=pk)
        members = Membership.objects.for_tenant(mail.tenant_id).filter(role__in=mail.roles)
        to = sorted(members.values_list("user__email", flat=True))
    name = salted_hmac("tenants.outbox.email_outbox", str(pk)).hexdigest()
    domain = settings.DEFAULT_FROM_EMAIL.rpartition("@")[2].rstrip("> ")
    return letter(mail.subject, mail.body, to, headers={"Message-ID": f"<{name}@{domain}>"})
