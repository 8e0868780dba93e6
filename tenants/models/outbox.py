"""The columns that all outboxes share."""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import models

from tenants.isolation.scopes import TenantManager


def utc_now() -> datetime:
    return datetime.now(UTC)


class OutboxRow(models.Model):
    """A message that is written in the transaction that causes it, and sent afterwards by tenants.outbox.delivery.

    It is due if its state is the first one of `State` and `next_attempt_at` is past. A sender leases it until
    `leased_until`.
    """

    attempt_count = models.SmallIntegerField(default=0, help_text="since its creation or last replay")
    next_attempt_at = models.DateTimeField(default=utc_now)
    leased_until = models.DateTimeField(null=True)

    objects = TenantManager()

    class Meta:
        abstract = True
