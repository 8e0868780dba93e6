"""Webhooks: where a tenant wants to be told of events, what happened, and every try to tell it."""

from __future__ import annotations

import secrets
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager
from tenants.models.tenancy import Tenant


def new_uid() -> str:
    """Return an event's name to the outside: the same in every try, by which a receiver knows it again."""
    return f"evt_{secrets.token_hex(16)}"


def new_nonce() -> str:
    """Return what an endpoint's secret is made of, together with the platform's own."""
    return secrets.token_hex(16)


class WebhookEndpoint(models.Model):
    """An address that events are sent to. Its secret is made of `nonce` and stored nowhere (tenants.webhooks.signing).

    After a rotation what `old_nonce` makes signs too, until `old_until`.
    """

    AUDITED: ClassVar = ("url", "description", "kinds", "active", "disabled_because")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    url = models.CharField(max_length=500)
    description = models.CharField(max_length=200, blank=True)
    kinds = ArrayField(models.CharField(max_length=40), default=list, blank=True, help_text="empty: every kind")
    active = models.BooleanField(default=True)
    disabled_because = models.CharField(max_length=200, blank=True, help_text="why the platform disabled it")
    failing_since = models.DateTimeField(null=True, help_text="when the first failed that no success came after")
    nonce = models.CharField(max_length=32, default=new_nonce)
    old_nonce = models.CharField(max_length=32, blank=True)
    old_until = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    def __str__(self) -> str:
        return self.url


class WebhookEvent(models.Model):
    """Something that happened to the tenant, once for each key. Written in the transaction that made it happen."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    uid = models.CharField(max_length=40, default=new_uid, unique=True)
    kind = models.CharField(max_length=40)
    key = models.CharField(max_length=120, help_text="what makes it the same event, in the tenant")
    payload = models.JSONField()
    at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["tenant", "key"], name="webhook_event_once")]
        indexes: ClassVar = [
            models.Index(fields=["tenant", "-id"], name="webhook_event_tenant"),
            models.Index(fields=["at"], name="webhook_event_at"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.uid}"


class WebhookDelivery(models.Model):
    """An event on its way to an endpoint. Due when pending and `next_at` is past; its sender has a lease."""

    class State(models.TextChoices):
        PENDING = "pending"
        DELIVERED = "delivered"
        FAILED = "failed"  # every try failed, or the endpoint was disabled; may be replayed

    AUDITED: ClassVar = ("event_id", "endpoint_id", "state", "tries")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    event = models.ForeignKey(WebhookEvent, on_delete=models.CASCADE)
    endpoint = models.ForeignKey(WebhookEndpoint, on_delete=models.CASCADE)
    state = models.CharField(max_length=9, choices=State, default=State.PENDING)
    tries = models.SmallIntegerField(default=0, help_text="since it was made or last replayed")
    next_at = models.DateTimeField()
    leased_until = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["event", "endpoint"], name="webhook_delivery_once")]
        indexes: ClassVar = [
            models.Index(fields=["next_at"], condition=Q(state="pending"), name="webhook_delivery_due"),
            models.Index(
                fields=["tenant"],
                condition=Q(state="pending", leased_until__isnull=False),
                name="webhook_delivery_leased",
            ),
            models.Index(fields=["endpoint", "-id"], name="webhook_delivery_endpoint"),
        ]

    def __str__(self) -> str:
        return f"{self.event} to {self.endpoint}"


class WebhookAttempt(models.Model):
    """One try to send a delivery, and what came of it."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    delivery = models.ForeignKey(WebhookDelivery, on_delete=models.CASCADE, related_name="attempts")
    at = models.DateTimeField()
    status = models.SmallIntegerField(null=True, help_text="the answer's HTTP status; null: there was no answer")
    ms = models.IntegerField(help_text="how long it took")
    error = models.CharField(max_length=200, blank=True)
    excerpt = models.TextField(blank=True, help_text="how the answer's body began")

    objects = TenantManager()

    def __str__(self) -> str:
        return f"{self.status or self.error} in {self.ms} ms"


class Mail(models.Model):
    """A mail to the members of some roles, written in the transaction of what it tells of. Sent by
    tenants.outbox.email_outbox."""

    class State(models.TextChoices):
        QUEUED = "queued"  # also after tries that failed
        SENT = "sent"
        FAILED = "failed"  # every try failed, or nobody has the roles

    MOST_TRIES: ClassVar = 12

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    roles = ArrayField(models.CharField(max_length=10))
    subject = models.CharField(max_length=200)
    text = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)
    claimed_at = models.DateTimeField(null=True)
    tries = models.SmallIntegerField(default=0)
    sent_at = models.DateTimeField(null=True)
    error = models.CharField(max_length=200, blank=True, default="", db_default="", help_text="why the last try failed")

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["id"], condition=Q(sent_at__isnull=True), name="mail_unsent")]

    def __str__(self) -> str:
        return self.subject

    @property
    def state(self) -> State:
        if self.sent_at is not None:
            return Mail.State.FAILED if self.error else Mail.State.SENT
        return Mail.State.QUEUED if self.tries < Mail.MOST_TRIES else Mail.State.FAILED
