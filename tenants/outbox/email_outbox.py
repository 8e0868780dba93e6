"""The outboxes of emails. An email is written in the transaction that causes it and sent by a web job.

An email is sent once, with one exception. If a sender is killed after the mail server accepted the email and before
that was stored, the email is sent again with the same Message-ID.
"""

from __future__ import annotations

import smtplib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

from django.conf import settings
from django.core.mail import EmailMessage
from django.db.models import QuerySet
from django.utils.crypto import salted_hmac

from inference_worker.contract.texts import Text
from tenants import invitations
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Invitation, Membership, NotificationChannel, OutboxEmail, OutboxRow, User
from tenants.notifications.kinds import NOTIFICATION_KINDS, NotificationKind
from tenants.outbox.delivery import Outbox, register, release_connection
from tenants.outbox.email_rendering import render_email

NO_RECIPIENT = Text("No member has a role that receives this email.")
INVITATION_CLOSED = Text("The invitation was accepted, revoked or has expired.")


class EmailResult(NamedTuple):
    """The result of an attempt to send an email."""

    error: str
    to: tuple[str, ...]

    @property
    def is_success(self) -> bool:
        return not self.error


E = TypeVar("E", bound=OutboxRow)


class EmailOutbox(Outbox[E, EmailResult]):
    """Base class of outboxes whose messages are emails."""

    waiting, sent = "queued", "sent"
    retry_seconds = tuple(120 * 2**attempt for attempt in range(1, 12))  # twelve attempts in almost six days
    lease = timedelta(minutes=4)  # a mail server can take 20 s for each command
    message_id_salt = ""

    def compose(self, row: E) -> EmailMessage:
        """Return the email with its present recipients. The scope of all tenants is open."""
        raise NotImplementedError

    def attempt(self, row: E) -> EmailResult:
        with all_tenants_scope(self.reason):
            message = self.compose(row)
        release_connection()
        to = tuple(message.to)
        if not to:
            return EmailResult(NO_RECIPIENT, to)
        name = salted_hmac(self.message_id_salt, str(row.pk)).hexdigest()
        domain = settings.DEFAULT_FROM_EMAIL.rpartition("@")[2].rstrip("> ")
        message.extra_headers["Message-ID"] = f"<{name}@{domain}>"
        try:
            message.send()
        except (OSError, smtplib.SMTPException) as exc:
            return EmailResult(error_message(exc), to)
        return EmailResult("", to)

    def failure(self, error: str) -> EmailResult:
        return EmailResult(error, ())


class MemberEmailOutbox(EmailOutbox[OutboxEmail]):
    """The emails to the members of a tenant with some roles, and to the recipients of invitations."""

    name = "email"
    reason = BypassReason.WEBHOOKS
    model = OutboxEmail
    related = ("tenant", "invitation__tenant", "invitation__invited_by")
    message_id_salt = "tenants.outbox.email_outbox"

    def attempt(self, row: OutboxEmail) -> EmailResult:
        if row.invitation is not None and not row.invitation.is_open:
            return EmailResult(INVITATION_CLOSED, ())
        return super().attempt(row)

    def compose(self, row: OutboxEmail) -> EmailMessage:
        if row.invitation is not None:
            return invitations.compose(row.invitation)
        to = sorted(_recipients(row).values_list("email", flat=True))
        if not row.notification_kind:
            return render_email(row.subject, row.body, to)
        base = "operator" if row.tenant is None else f"t/{row.tenant.slug}"
        channels = f"{settings.MILLRACE.base_url}/{base}/notifications/channels"
        return render_email(
            row.subject,
            row.body,
            to,
            reason="You receive this email because of your notification settings. Change them:",
            settings_url=channels,
            headers={"List-Unsubscribe": f"<{channels}>"},
        )

    def is_final(self, row: OutboxEmail, result: EmailResult) -> bool:
        return result.error in (NO_RECIPIENT, INVITATION_CLOSED)

    def store(self, row: OutboxEmail, current: OutboxEmail, result: EmailResult, now: datetime) -> None:
        if result.is_success or self.is_final(row, result):
            current.sent_at, current.error = now, result.error
        elif current.sent_at is None:
            current.error = result.error
        current.save(update_fields=["sent_at", "error"])


MEMBER_EMAILS = MemberEmailOutbox()
register(MEMBER_EMAILS)


def _recipients(row: OutboxEmail) -> QuerySet[User]:
    """Return the users who receive an email to members or operators now."""
    if row.tenant_id is None:
        users = User.objects.filter(is_staff=True, is_active=True)
        chosen = NotificationChannel.objects.all_tenants().filter(tenant=None)
    else:
        members = Membership.objects.for_tenant(row.tenant_id).filter(role__in=row.roles, alert_emails=True)
        users = User.objects.filter(pk__in=members.values("user"))
        chosen = NotificationChannel.objects.for_tenant(row.tenant_id)
    if row.except_user_id is not None:
        users = users.exclude(pk=row.except_user_id)
    kind = NOTIFICATION_KINDS.get(row.notification_kind)
    if kind is None:
        return users
    chosen = chosen.filter(kind=kind.name)
    if kind.is_emailed:
        return users.exclude(pk__in=chosen.filter(by_email=False).values("user"))
    return users.filter(pk__in=chosen.filter(by_email=True).values("user"))


def enqueue_email(
    tenant_id: int | None,
    roles: Sequence[str],
    subject: str,
    body: str,
    *,
    kind: NotificationKind | None = None,
    except_user_id: int | None = None,
) -> OutboxEmail:
    """Write an email to the members with these roles, in the caller's transaction and scope.

    Args:
        tenant_id: None for an email to operators.
        kind: a kind of notifications: only those receive it who receive the kind by email.
        except_user_id: a user who does not receive it.
    """
    row = OutboxEmail(tenant_id=tenant_id, roles=list(roles), subject=subject[:200], body=body)
    row.notification_kind, row.except_user_id = "" if kind is None else kind.name, except_user_id
    row.save(force_insert=True)
    return row


def enqueue_invitation(invitation: Invitation) -> OutboxEmail:
    """Write the email of an invitation, in the caller's transaction and scope. Its text is composed when it is sent."""
    return OutboxEmail.objects.create(
        tenant_id=invitation.tenant_id, roles=[], invitation=invitation, subject=invitations.subject(invitation)[:200]
    )


def delete_unsent_invitation(invitation: Invitation) -> None:
    """Delete the email of an invitation that is no longer open, unless it was sent."""
    OutboxEmail.objects.for_tenant(invitation.tenant_id).filter(invitation=invitation, sent_at=None).delete()


def error_message(error: OSError | smtplib.SMTPException) -> str:
    """Return the message for the tenant. The mail server's own message can contain host names and logins."""
    match error:
        case smtplib.SMTPRecipientsRefused():
            return Text("The mail server rejected the recipients.")
        case smtplib.SMTPAuthenticationError():
            return Text("The mail server rejected the platform’s login.")
        case smtplib.SMTPResponseException():
            return Text("The mail server responded with %(code)s.", code=error.smtp_code)
    return Text("The mail server could not be reached.")
