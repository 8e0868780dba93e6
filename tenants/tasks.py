"""Web jobs of tenants. `schedule.py` contains the schedule of the periodic ones."""

from __future__ import annotations

import smtplib
from datetime import UTC, datetime, timedelta

import redis
import structlog
from celery import shared_task

from tenants import idempotency_rules, jobs
from tenants.actions import do_purge_tenant
from tenants.credentials import delivery as credential_delivery
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import (
    ChangeEventRow,
    IdempotentResponse,
    OutboxEmail,
    Tenant,
    WebhookAttempt,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEvent,
)
from tenants.notifications import upkeep
from tenants.outbox import change_feed, delivery, email_outbox, user_emails
from tenants.webhooks import sending

log = structlog.get_logger(__name__)
__all__ = ("email_outbox", "sending")  # they register their outboxes
EVENT_RETENTION = timedelta(days=90)
LISTENER_RETENTION = timedelta(days=30)  # after the last poll


@shared_task(
    name="tenants.send_user_email",
    autoretry_for=(OSError, smtplib.SMTPException),
    retry_backoff=10,
    max_retries=8,
)
def send_user_email(user_id: int, subject: str, text: str, button: str, reason: str) -> None:
    user_emails.send_user_email(user_id, subject, text, button, reason)


@shared_task(
    name="tenants.send_second_factor_removed_email",
    autoretry_for=(OSError, smtplib.SMTPException),
    retry_backoff=10,
    max_retries=8,
)
def send_second_factor_removed_email(user_id: int) -> None:
    user_emails.send_second_factor_removed_email(user_id)


@shared_task(
    name="tenants.send_password_reset_email",
    autoretry_for=(OSError, smtplib.SMTPException),
    retry_backoff=10,
    max_retries=8,
)
def send_password_reset_email(email: str) -> None:
    user_emails.send_password_reset_email(email)


@shared_task(name="tenants.purge_deleted")
def purge_deleted() -> int:
    """Purge the tenants whose grace period is over. Returns their number."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        due = list(Tenant.objects.all_tenants().filter(purge_after__lte=datetime.now(UTC)))
    return sum(do_purge_tenant(tenant) for tenant in due)


@shared_task(name="tenants.purge_expired")
def purge_expired() -> None:
    """Remove old change events, idempotent responses, jobs, webhook events, listeners, emails and notifications."""
    now = datetime.now(UTC)
    jobs.remove_old_jobs(now)
    upkeep.remove_old_notifications(now)
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        old = now - timedelta(seconds=change_feed.RETENTION_SECONDS)
        ChangeEventRow.objects.all_tenants().filter(created_at__lt=old).delete()
        IdempotentResponse.objects.all_tenants().filter(created_at__lt=now - idempotency_rules.RETENTION).delete()
        oldest = now - EVENT_RETENTION
        WebhookAttempt.objects.all_tenants().filter(delivery__event__created_at__lt=oldest).delete()
        WebhookDelivery.objects.all_tenants().filter(event__created_at__lt=oldest).delete()
        WebhookEvent.objects.all_tenants().filter(created_at__lt=oldest).delete()
        listeners = WebhookEndpoint.objects.all_tenants()
        silent = listeners.filter(polled_at__lt=now - LISTENER_RETENTION).select_for_update(skip_locked=True)
        listeners.filter(pk__in=[row.pk for row in silent]).delete()
        OutboxEmail.objects.all_tenants().filter(created_at__lt=oldest).delete()


@shared_task(name="tenants.notify_of_expiring_keys")
def notify_of_expiring_keys() -> int:
    """Write notifications of API keys that expire soon. Returns their number."""
    return upkeep.notify_of_expiring_keys(datetime.now(UTC))


@shared_task(name="tenants.run_jobs")
def run_jobs() -> int:
    """Run the jobs of tenants that wait. Returns their number."""
    return jobs.run_jobs()


@shared_task(name="tenants.deliver_credentials")
def deliver_credentials() -> int:
    """Send upstream credentials to workers that need them. Returns the number of replaced boxes."""
    try:
        return credential_delivery.deliver_credentials()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return 0


@shared_task(name="tenants.deliver")
def deliver(outbox: str) -> int:
    """Send the due messages of an outbox. Returns the number of attempts."""
    return delivery.deliver(outbox)
