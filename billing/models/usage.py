"""What was used: one row per execution, for ever; and the messages that could not become one."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import F, Q

from tenants.isolation.scopes import TenantManager

MAX_TOKENS = 100_000_000  # of one class in one execution; more is a fault of the reporter, not use
ANSWER_HITS = ("answer_hit_input", "answer_hit_output")  # tokens that a cached answer made needless
TOKEN_CLASSES = ("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output")


class ExecutionOutcome(models.TextChoices):
    """How an execution ended. A failed one is never billed."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


def _counts() -> Q:
    """Every count is a possible one."""
    tokens = Q(*((f"{name}__range", (0, MAX_TOKENS)) for name in TOKEN_CLASSES))
    times = Q(queue_us__gte=0, ttft_us__gte=0, duration_us__gte=0)
    return tokens & times & Q(execution__gte=0, attempt__gte=0, block_size__gte=0)


class ReleasedBy(models.TextChoices):
    """What released the unused part of a reservation: a gateway before the settlement, or the settlement itself."""

    GATEWAY = "gateway"
    SETTLER = "settler"


class UsageEvent(models.Model):
    """What one execution of one request used. Written by the settler alone, never changed (triggers see to that).

    NOTE: (request_id, execution) is what must be unique, and it is, though PostgreSQL wants the partition column in the
    key: the gateway stamps `admitted_at` once, when it admits the execution, and the stamp travels in the execution's
    envelope through every attempt, replay and redelivery. So an execution has one `admitted_at`, and the key tells
    executions apart as (request_id, execution) alone would. A second billing context for an execution breaks this.

    Ids of tenant, project and key are no foreign keys: events outlive what they name.
    """

    pk = models.CompositePrimaryKey("admitted_at", "request_id", "execution")
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()
    model = models.CharField(max_length=128)
    attempt = models.IntegerField()
    outcome = models.CharField(max_length=16, choices=ExecutionOutcome)
    finish_reason = models.CharField(max_length=64)
    uncached = models.IntegerField()
    cache_read = models.IntegerField()
    cache_write_5m = models.IntegerField()
    cache_write_1h = models.IntegerField()
    output = models.IntegerField()
    replica_id = models.CharField(max_length=128)
    block_size = models.IntegerField()
    queue_us = models.BigIntegerField()
    ttft_us = models.BigIntegerField()
    duration_us = models.BigIntegerField()
    price_version = models.BigIntegerField(null=True)
    slice_id = models.BigIntegerField(null=True)
    fence = models.BigIntegerField(null=True)
    hold = models.BigIntegerField(null=True, help_text="nano-USD held at admission")
    answer_hit_input = models.IntegerField(db_default=0)
    answer_hit_output = models.IntegerField(db_default=0)
    price_ids = ArrayField(
        models.BigIntegerField(null=True), null=True, help_text="in the order of pricing.COMPONENTS; None: not priced"
    )
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0, db_default=0)
    saved_femto = models.DecimalField(
        max_digits=38, decimal_places=0, db_default=0, help_text="by caches; negative if writing to them cost more"
    )
    invoice_period = models.BigIntegerField(null=True, help_text="the period whose invoice it is on")
    miss_reason = models.CharField(max_length=32, db_default="", help_text="why the prefix cache did not give it all")
    changed_at = models.IntegerField(null=True, help_text="the prompt's first token that differs from a known prefix")
    unpinned_tokens = models.IntegerField(db_default=0, help_text="asked to be kept, and not, for want of room")
    settled_at = models.DateTimeField()
    released_by = models.CharField(
        max_length=8,
        choices=ReleasedBy,
        null=True,
        help_text="what released the unused part of its reservation; None: nothing was reserved",
    )

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(F("tenant_id"), F("admitted_at").desc(), name="billing_usage_tenant_time"),
            models.Index(F("key_id"), F("admitted_at").desc(), name="billing_usage_key_time"),
            models.Index(F("request_id"), name="billing_usage_request"),
            # Stamps come in the order of rows, so this small index tells an invoice's months from all others.
            BrinIndex(fields=["invoice_period"], name="billing_usage_period", autosummarize=True),
            BrinIndex(F("settled_at"), name="billing_usage_settled"),
        ]
        constraints: ClassVar = [
            models.CheckConstraint(name="billing_usage_counts", condition=_counts()),
            models.CheckConstraint(
                name="billing_usage_rated",
                condition=Q(
                    answer_hit_input__range=(0, MAX_TOKENS),
                    answer_hit_output__range=(0, MAX_TOKENS),
                    cost_femto__gte=0,
                ),
            ),
            models.CheckConstraint(name="billing_usage_outcome", condition=Q(outcome__in=ExecutionOutcome.values)),
            models.CheckConstraint(name="billing_usage_hold", condition=Q(hold__isnull=True) | Q(hold__gte=0)),
            models.CheckConstraint(
                name="billing_usage_ids",
                condition=Q(tenant_id__gt=0, project_id__gt=0, key_id__gt=0) & ~Q(request_id="") & ~Q(model=""),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution}"


class UsageQuarantine(models.Model):
    """A message of the usage stream that could not become an event: kept as it came, for a person to look at."""

    class Reason(models.TextChoices):
        UNDECODABLE = "undecodable"  # not a usage event at all
        REFUSED = "refused"  # decodes, but breaks a rule of the table: see `detail`
        UNPLACEABLE = "unplaceable"  # of a month that has no partition
        CONFLICT = "conflict"  # of an execution that has been settled, with other counts

    AUDITED: ClassVar = ("stream_id", "reason", "detail", "resolved_at")

    received_at = models.DateTimeField()
    stream_id = models.CharField(max_length=64)
    reason = models.CharField(max_length=16, choices=Reason)
    detail = models.TextField()
    payload = models.BinaryField()
    payload_hash = models.BinaryField(unique=True)  # SHA-256: a message that comes again is one row still
    resolved_at = models.DateTimeField(null=True)

    class Meta:
        indexes: ClassVar = [
            models.Index(
                F("received_at").desc(), condition=Q(resolved_at__isnull=True), name="billing_quarantine_open"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.stream_id} ({self.reason})"
