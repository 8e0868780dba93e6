"""Webhook endpoints, webhook events, their deliveries and attempts, and the email outbox."""

from __future__ import annotations

import secrets
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager
from tenants.models.outbox import OutboxRow
from tenants.models.tenancy import Tenant
from tenants.text_field import UserTextField


def new_public_id() -> str:
    """Return an ID for an event. Every attempt sends the same ID, so that receivers can detect repeats."""
    return f"evt_{secrets.token_hex(16)}"


def new_nonce() -> str:
    """Return a nonce from which, with the platform's secret, an endpoint's signing secret is derived."""
    return secrets.token_hex(16)


class WebhookEndpoint(models.Model):
    """A URL that events are sent to: a webhook, an alert channel (tenants.webhooks.channels), or a listener.

    A listener is a program such as `millrace listen`, which fetches events and posts them itself
    (tenants.actions.listeners). The platform sends nothing to its URL, which may be local.

    Its signing secret is derived from `nonce` and not stored (tenants.webhooks.signing). After a rotation, the secret
    of `previous_nonce` also signs until `previous_expires_at`.
    """

    class Kind(models.TextChoices):
        WEBHOOK = "webhook"  # signed JSON (Standard Webhooks)
        SLACK = "slack", "Slack"
        PAGERDUTY = "pagerduty", "PagerDuty"
        LISTENER = "listener"

    AUDITED: ClassVar = ("kind", "url", "description", "event_types", "active", "disabled_because")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    kind = models.CharField(max_length=9, choices=Kind, default=Kind.WEBHOOK, db_default=Kind.WEBHOOK)
    device = models.CharField(
        max_length=64, blank=True, default="", db_default="", help_text="of a listener: the machine that it runs on"
    )
    polled_at = models.DateTimeField(null=True, help_text="of a listener: when it last asked for events, to a minute")
    ciphertext = models.BinaryField(null=True, help_text="of a channel: Slack's URL, or PagerDuty's routing key")
    encryption_key_id = models.CharField(max_length=16, blank=True, default="", db_default="")
    url = models.CharField(max_length=500)
    description = models.CharField(max_length=200, blank=True)
    event_types = ArrayField(models.CharField(max_length=40), default=list, blank=True, help_text="empty: all types")
    active = models.BooleanField(default=True)
    disabled_because = UserTextField(blank=True, help_text="why the platform disabled it")
    failing_since = models.DateTimeField(null=True, help_text="the first failure after the last success")
    nonce = models.CharField(max_length=32, default=new_nonce)
    previous_nonce = models.CharField(max_length=32, blank=True)
    previous_expires_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    def __str__(self) -> str:
        return self.url


class WebhookEvent(models.Model):
    """An event of a tenant, written in the transaction that caused it.

    A tenant has one event for each `deduplication_key`.
    """

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    public_id = models.CharField(max_length=40, default=new_public_id, unique=True)
    event_type = models.CharField(max_length=40)
    deduplication_key = models.CharField(max_length=120, help_text="unique in the tenant")
    payload = models.JSONField()
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "deduplication_key"], name="webhook_event_once")
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant", "-id"], name="webhook_event_tenant"),
            models.Index(fields=["created_at"], name="webhook_event_created"),
        ]

    def __str__(self) -> str:
        return f"{self.event_type} {self.public_id}"


class WebhookDelivery(OutboxRow):
    """The delivery of an event to an endpoint."""

    class State(models.TextChoices):
        PENDING = "pending"
        WAITING = "waiting"  # for a listener, which fetches it
        DELIVERED = "delivered"
        FAILED = "failed"  # every attempt failed, or the endpoint was disabled; can be replayed

    AUDITED: ClassVar = ("event_id", "endpoint_id", "state", "attempt_count")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    event = models.ForeignKey(WebhookEvent, on_delete=models.CASCADE)
    endpoint = models.ForeignKey(WebhookEndpoint, on_delete=models.CASCADE)
    state = models.CharField(max_length=9, choices=State, default=State.PENDING)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["event", "endpoint"], name="webhook_delivery_once")]
        indexes: ClassVar = [
            models.Index(fields=["next_attempt_at"], condition=Q(state="pending"), name="webhook_delivery_due"),
            models.Index(
                fields=["tenant"],
                condition=Q(state="pending", leased_until__isnull=False),
                name="webhook_delivery_leased",
            ),
            models.Index(fields=["endpoint", "-id"], name="webhook_delivery_endpoint"),
            models.Index(fields=["endpoint", "id"], condition=Q(state="waiting"), name="webhook_delivery_waiting"),
        ]

    def __str__(self) -> str:
        return f"{self.event} to {self.endpoint}"

    @classmethod
    def first_state(cls, endpoint: WebhookEndpoint) -> State:
        """Return the state of a delivery that is to be sent."""
        return cls.State.WAITING if endpoint.kind == WebhookEndpoint.Kind.LISTENER else cls.State.PENDING


class WebhookAttempt(models.Model):
    """An attempt of a delivery and its result."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    delivery = models.ForeignKey(WebhookDelivery, on_delete=models.CASCADE, related_name="attempts")
    attempted_at = models.DateTimeField()
    status = models.SmallIntegerField(null=True, help_text="HTTP status of the response; null: no response")
    duration_ms = models.IntegerField()
    error = UserTextField(blank=True)
    excerpt = models.TextField(blank=True, help_text="start of the response body")

    objects = TenantManager()

    def __str__(self) -> str:
        return f"{self.status or self.error} in {self.duration_ms} ms"


class OutboxEmail(OutboxRow):
    """An email to the members with some roles, to operators, or to the recipient of an invitation.

    See tenants.outbox.email_outbox. Of a kind of notifications, it goes to those who receive the kind by email.
    """

    class State(models.TextChoices):
        QUEUED = "queued"  # also after failed attempts
        SENT = "sent"
        FAILED = "failed"  # every attempt failed, or there is no recipient

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, null=True, help_text="null: to operators")
    roles = ArrayField(models.CharField(max_length=10))
    notification_kind = models.CharField(max_length=32, blank=True, default="", db_default="")
    except_user_id = models.BigIntegerField(null=True, help_text="the user who caused it, who does not receive it")
    invitation = models.OneToOneField(
        "tenants.Invitation", on_delete=models.CASCADE, null=True, related_name="outbox_email"
    )
    subject = models.CharField(max_length=200)
    body = models.TextField(help_text="empty for an invitation, because the link is secret")
    created_at = models.DateTimeField(auto_now_add=True)
    state = models.CharField(max_length=9, choices=State, default=State.QUEUED)
    sent_at = models.DateTimeField(null=True)
    error = UserTextField(blank=True, default="", db_default="", help_text="why the last attempt failed")

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["next_attempt_at"], condition=Q(state="queued"), name="outbox_email_due"),
            models.Index(fields=["id"], condition=Q(sent_at__isnull=True), name="outbox_email_unsent"),
        ]

    def __str__(self) -> str:
        return self.subject
