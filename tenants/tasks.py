"""Web jobs of tenants (see tenants/schedule.py for those that beat runs)."""

from __future__ import annotations

import smtplib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import structlog
from celery import shared_task

from tenants import invitations
from tenants.actions import do_purge_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import (
    ChangeEventRow,
    IdempotentResponse,
    OutboxEmail,
    Tenant,
    WebhookAttempt,
    WebhookDelivery,
    WebhookEvent,
)
from tenants.outbox import change_feed, email_outbox, user_emails
from tenants.webhooks import sending

log = structlog.get_logger(__name__)
IDEMPOTENT_RESPONSE_RETENTION = timedelta(hours=24)
EVENT_RETENTION = timedelta(days=90)


@shared_task(
    name="tenants.mail_invitation", autoretry_for=(OSError, smtplib.SMTPException), retry_backoff=10, max_retries=8
)
def mail_invitation(tenant_id: int, invitation_id: int) -> None:
    invitations.mail(tenant_id, invitation_id)


@shared_task(
    name="tenants.mail_second_factor_removed",
    autoretry_for=(OSError, smtplib.SMTPException),
    retry_backoff=10,
    max_retries=8,
)
def mail_second_factor_removed(user_id: int) -> None:
    user_emails.mail_second_factor_removed(user_id)


@shared_task(name="tenants.purge_deleted")
def purge_deleted() -> int:
    """Empty the tenants whose grace is over; returns how many."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        due = list(Tenant.objects.all_tenants().filter(purge_after__lte=datetime.now(UTC)))
    return sum(do_purge_tenant(tenant) for tenant in due)


@shared_task(name="tenants.purge_expired")
def purge_expired() -> None:
    """Forget what gateways have long read, and answers that will not be asked for again."""
    now = datetime.now(UTC)
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        old = now - timedelta(seconds=change_feed.RETENTION_SECONDS)
        ChangeEventRow.objects.all_tenants().filter(created_at__lt=old).delete()
        IdempotentResponse.objects.all_tenants().filter(created_at__lt=now - IDEMPOTENT_RESPONSE_RETENTION).delete()
        oldest = now - EVENT_RETENTION
        WebhookAttempt.objects.all_tenants().filter(delivery__event__created_at__lt=oldest).delete()
        WebhookDelivery.objects.all_tenants().filter(event__created_at__lt=oldest).delete()
        WebhookEvent.objects.all_tenants().filter(created_at__lt=oldest).delete()
        OutboxEmail.objects.all_tenants().filter(created_at__lt=oldest).delete()


@shared_task(name="tenants.send_webhooks")
def send_webhooks() -> int:
    """Send the webhooks that are due, several at once; returns how many were tried."""
    senders = sending.senders_wanted()
    if not senders:
        return 0
    with ThreadPoolExecutor(senders, "webhooks") as pool:
        return sum(pool.map(lambda _: sending.send_all(), range(senders)))


@shared_task(name="tenants.send_mails")
def send_mails() -> int:
    """Send the mails that are due; returns how many were sent."""
    return email_outbox.send_mails()
