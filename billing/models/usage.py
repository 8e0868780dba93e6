"""Usage events, one row for each execution, and the messages in quarantine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import F, Q
from django.db.models.expressions import Combinable

from billing.models.token_columns import PricedTokens
from inference_worker.contract.request import TOKEN_CLASSES
from tenants.isolation.scopes import TenantManager
from tenants.text_field import UserTextField

MAX_TOKENS = 100_000_000  # tokens of one class in one execution; a larger count is an error of the sender


class ExecutionOutcome(models.TextChoices):
    """The outcome of an execution. A failed execution is never billed."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


def token_sum(classes: Sequence[str] = TOKEN_CLASSES) -> Combinable:
    """Return the expression of a row's tokens of these classes together."""
    return reduce(add, map(F, classes))


def _counts() -> Q:
    """Return the condition that all counts are possible."""
    tokens = Q(*((f"{name}__range", (0, MAX_TOKENS)) for name in TOKEN_CLASSES))
    times = Q(queue_us__gte=0, ttft_us__gte=0, duration_us__gte=0)
    return tokens & times & Q(execution__gte=0, attempt__gte=0, block_size__gte=0)


class ReleasedBy(models.TextChoices):
    """The component that released the unused part of a reservation: a gateway early, or the settler."""

    GATEWAY = "gateway"
    SETTLER = "settler"


class UsageSource(models.TextChoices):
    """The origin of an execution's token counts."""

    ENGINE = "engine"  # Millrace's own engine
    UPSTREAM = "upstream"  # the upstream's final usage
    ESTIMATED = "estimated"  # counted by Millrace, because the upstream sent no final usage


class UsageEvent(PricedTokens):
    """The usage and cost of one execution. Written once by the settler; triggers reject changes.

    NOTE: (request_id, execution) must be unique, but PostgreSQL requires the partition column in the primary key. The
    gateway sets `admitted_at` once, when it admits the execution. The billing context carries it through every attempt,
    replay and redelivery. So an execution has one `admitted_at`, and the primary key is as unique as (request_id,
    execution). A second billing context for an execution would break this.

    The ids of tenant, project and key are not foreign keys, because events outlive those rows.
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
    replica_id = models.CharField(max_length=128)
    block_size = models.IntegerField()
    queue_us = models.BigIntegerField()
    ttft_us = models.BigIntegerField()
    duration_us = models.BigIntegerField()
    price_version = models.BigIntegerField(null=True)
    lease_id = models.BigIntegerField(null=True)
    fencing_token = models.BigIntegerField(null=True)
    reserved_nano = models.BigIntegerField(null=True, help_text="reserved at admission, in nano-USD")
    answer_hit_input = models.IntegerField(db_default=0)
    answer_hit_output = models.IntegerField(db_default=0)
    price_ids = ArrayField(
        models.BigIntegerField(null=True), null=True, help_text="in the order of pricing.COMPONENTS; None: not priced"
    )
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0, db_default=0)
    saved_femto = models.DecimalField(
        max_digits=38,
        decimal_places=0,
        db_default=0,
        help_text="saved by caches; negative if the cache writes cost more",
    )
    invoice_period = models.BigIntegerField(null=True, help_text="the billing period whose invoice includes it")
    miss_reason = models.CharField(max_length=32, db_default="", help_text="the reason of a prefix cache miss")
    changed_at = models.IntegerField(null=True, help_text="the prompt's first token that differs from a known prefix")
    unpinned_tokens = models.IntegerField(
        db_default=0, help_text="requested to be pinned and not pinned for lack of space"
    )
    reasoning_tokens = models.IntegerField(db_default=0, help_text="part of output")
    usage_source = models.CharField(
        max_length=9, choices=UsageSource, db_default=UsageSource.ENGINE, help_text="the origin of the token counts"
    )
    unbilled_tokens = models.IntegerField(
        db_default=0, help_text="reported above the reservation; not charged, and in no other count"
    )
    accepted_drafts = models.IntegerField(db_default=0, help_text="draft tokens that became part of output")
    rejected_drafts = models.IntegerField(db_default=0, help_text="draft tokens that were verified in vain; not billed")
    host_tokens = models.IntegerField(db_default=0, help_text="part of cache_read that was restored from CPU memory")
    end_user = models.CharField(max_length=128, db_default="", help_text="`user` of the request")
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
            models.Index(
                F("tenant_id"),
                F("admitted_at").desc(),
                condition=Q(miss_reason="prefix_changed"),
                name="billing_usage_prefix_changed",
            ),
            # Periods are written in the order of rows, so this small index finds the partitions of an invoice.
            BrinIndex(fields=["invoice_period"], name="billing_usage_period", autosummarize=True),
            # Queries read few rows, the newest ones. Small ranges exclude more of the others.
            BrinIndex(F("settled_at"), name="billing_usage_settled_at", pages_per_range=16, autosummarize=True),
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
            models.CheckConstraint(
                name="billing_usage_reserved", condition=Q(reserved_nano__isnull=True) | Q(reserved_nano__gte=0)
            ),
            models.CheckConstraint(
                name="billing_usage_ids",
                condition=Q(tenant_id__gt=0, project_id__gt=0, key_id__gt=0) & ~Q(request_id="") & ~Q(model=""),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution}"


class UsageQuarantine(models.Model):
    """A message of the usage stream that could not be settled, stored unchanged for an operator."""

    class Reason(models.TextChoices):
        UNDECODABLE = "undecodable"  # not a usage event
        REFUSED = "refused"  # violates a constraint of the table: see `detail`
        UNPLACEABLE = "unplaceable"  # its month has no partition
        CONFLICT = "conflict"  # its execution was settled with other counts

    AUDITED: ClassVar = ("stream_id", "reason", "detail", "resolved_at")

    received_at = models.DateTimeField()
    stream_id = models.CharField(max_length=64)
    reason = models.CharField(max_length=16, choices=Reason)
    detail = UserTextField()
    payload = models.BinaryField()
    payload_hash = models.BinaryField(unique=True)  # SHA-256, so that a repeated message is one row
    resolved_at = models.DateTimeField(null=True)

    class Meta:
        indexes: ClassVar = [
            models.Index(
                F("received_at").desc(), condition=Q(resolved_at__isnull=True), name="billing_quarantine_open"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.stream_id} ({self.reason})"
