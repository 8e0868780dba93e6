"""Sums of usage by hour and day, and the changes that they sum."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from billing.models.token_columns import TokenSums
from inference_worker.contract.request import TOKEN_COLUMNS
from tenants.isolation.scopes import TenantManager

SUMMED = (
    *("completed", "cancelled", "failed"),
    *TOKEN_COLUMNS,
    *("unpinned_tokens", "reasoning_tokens", "cost_femto", "saved_femto"),
)
GROUPED = ("tenant_id", "project_id", "key_id", "model", "tier", "miss_reason")


class _Grouped(models.Model):
    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()
    model = models.CharField(max_length=128)
    tier = models.CharField(max_length=10)  # empty: not priced
    miss_reason = models.CharField(max_length=32)

    class Meta:
        abstract = True


class _Summed(TokenSums):
    """Numbers of executions by outcome, and tokens by class and searches without those of failed executions."""

    completed = models.BigIntegerField()
    cancelled = models.BigIntegerField()
    failed = models.BigIntegerField()
    unpinned_tokens = models.BigIntegerField()
    reasoning_tokens = models.BigIntegerField(db_default=0, help_text="part of output")
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0)
    saved_femto = models.DecimalField(max_digits=38, decimal_places=0)

    class Meta:
        abstract = True


class UsageChange(_Grouped, _Summed):
    """A view: what one usage event or adjustment adds to the sums of usage."""

    pk = models.CompositePrimaryKey(
        "admitted_at", "request_id", "execution"
    )  # key of the event; its adjustments have the same
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    settled_at = models.DateTimeField(help_text="when it was written")
    end_user = models.CharField(max_length=128)

    objects = TenantManager()

    class Meta:
        managed = False

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution}"


_TEXT = models.CharField()


class UsageRollup(_Grouped, _Summed):
    """The sum of the changes of an hour or a day that were settled before `RollupState.settled_before`.

    The totals of all keys have key ID 0. Queries without keys read them: a tenant has far fewer of them. A column that
    a bucket does not have is 0 or empty.
    """

    class Bucket(models.TextChoices):
        HOUR = "hour"
        DAY = "day"
        HOUR_TOTAL = "hours"
        DAY_TOTAL = "days"
        KEY_DAY = "kdays"  # a day of a key, without model, tier and miss reason
        MONTH_TOTAL = "month"  # a month in UTC of a tenant and a model

    bucket = models.CharField(max_length=5, choices=Bucket)
    start = models.DateTimeField()

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant_id", "bucket", "start", *GROUPED[1:]], name="rollup_once"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["bucket", "start"], name="rollup_start"),
            models.Index(fields=["key_id", "bucket", "start"], name="rollup_key"),
        ]

    def __str__(self) -> str:
        return f"{self.bucket} {self.start}: {self.model}"


class EndUserRollup(_Summed):
    """The sum of the changes of a UTC day by end user, of those settled before `RollupState.end_users_before`.

    Of each key and day, only the end users with the highest cost have rows (`billing.metering.end_users`). Those of all
    others together have no end user: None. An empty end user is that of requests without one. The totals of all keys
    have key ID 0, as in `UsageRollup`.
    """

    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()
    model = models.CharField(max_length=128)
    end_user = models.CharField(max_length=128, null=True)
    start = models.DateTimeField()

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["tenant_id", "start", "key_id", "project_id", "model", "end_user"],
                name="end_user_rollup_once",
                nulls_distinct=False,
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["start"], name="end_user_rollup_start"),
            models.Index(fields=["key_id", "start"], name="end_user_rollup_key", condition=~models.Q(key_id=0)),
            models.Index(fields=["tenant_id", "start"], name="end_user_rollup_total", condition=models.Q(key_id=0)),
            models.Index(fields=["tenant_id", "end_user", "start"], name="end_user_rollup_user"),
        ]

    def __str__(self) -> str:
        return f"{self.start}: {self.end_user}"


def totals_of(bucket: UsageRollup.Bucket) -> models.Func:
    """Return the bucket of the totals of all keys; while they are not complete, the bucket itself."""
    return models.Func(models.Value(bucket.value), function="billing_rollup_bucket", output_field=_TEXT)


def coarse_or(bucket: UsageRollup.Bucket, other: UsageRollup.Bucket | models.Func) -> models.Func:
    """Return the bucket of days of keys or of months; while they are not complete, the other one."""
    fallback = other if isinstance(other, models.Func) else models.Value(other.value)
    return models.Func(models.Value(bucket.value), fallback, function="billing_rollup_coarse", output_field=_TEXT)


def evaluated_once(bucket: models.Func) -> models.Func:
    """Return the bucket for a filter with alternatives, which would compute it for each row.

    The planner does not know its value: the filter must also limit the tenant, so that an index is chosen anyway.
    """
    return models.Func(bucket, template="(SELECT %(expressions)s)", output_field=_TEXT)


def not_rolled_up() -> models.Q:
    """Return the filter for the changes that are not in the rollups.

    It is a stable function: the planner knows its value, and so how few rows are later.
    """
    before = models.Func(function="billing_rollup_settled_before", output_field=models.DateTimeField())
    return models.Q(settled_at__gte=before)


def not_rolled_up_by_end_user() -> models.Q:
    """Return the filter for the changes that are not in the rollups of end users."""
    before = models.Func(function="billing_end_users_settled_before", output_field=models.DateTimeField())
    return models.Q(settled_at__gte=before)


class PeriodUsage(models.Model):
    """The sums of a tenant's usage of a billing period by price, of what was settled before a time.

    Readers add what was settled since. It is written for months that are not invoiced: see `read_usage`.
    """

    tenant_id = models.BigIntegerField()
    period_id = models.BigIntegerField()
    settled_before = models.DateTimeField()
    lines = models.JSONField(help_text="[{price_id, usage_month, billed_period, events, tokens, first_at, last_at}]")

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["tenant_id", "period_id"], name="period_usage_once")]

    def __str__(self) -> str:
        return f"usage of period {self.period_id} up to {self.settled_before}"


class RollupState(models.Model):
    """The progress of the rollups, in one row."""

    settled_before = models.DateTimeField()
    totals_before = models.DateTimeField(null=True, help_text="the totals are complete if it is `settled_before`")
    coarse_before = models.DateTimeField(null=True, help_text="the same for days of keys, and for months")
    end_users_before = models.DateTimeField(null=True, help_text="the progress of the rollups of end users")

    def __str__(self) -> str:
        return f"rollups up to {self.settled_before}"
