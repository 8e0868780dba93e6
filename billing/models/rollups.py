"""Sums of usage by hour and day, and what they are sums of."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from tenants.isolation.scopes import TenantManager

SUMMED = (
    *("completed", "cancelled", "failed"),
    *("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output"),
    *("answer_hit_input", "answer_hit_output", "unpinned_tokens", "cost_femto", "saved_femto"),
)
GROUPED = ("tenant_id", "project_id", "key_id", "model", "tier", "miss_reason")


class _Grouped(models.Model):
    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()
    model = models.CharField(max_length=128)
    tier = models.CharField(max_length=10)  # empty: it was not priced
    miss_reason = models.CharField(max_length=32)

    class Meta:
        abstract = True


class _Summed(models.Model):
    """Executions by how they ended, and tokens by class; those of failed executions are in none."""

    completed = models.BigIntegerField()
    cancelled = models.BigIntegerField()
    failed = models.BigIntegerField()
    uncached = models.BigIntegerField()
    cache_read = models.BigIntegerField()
    cache_write_5m = models.BigIntegerField()
    cache_write_1h = models.BigIntegerField()
    output = models.BigIntegerField()
    answer_hit_input = models.BigIntegerField()
    answer_hit_output = models.BigIntegerField()
    unpinned_tokens = models.BigIntegerField()
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0)
    saved_femto = models.DecimalField(max_digits=38, decimal_places=0)

    class Meta:
        abstract = True


class UsageChange(_Grouped, _Summed):
    """A view: what one event, or one correction of an event, adds to sums of usage."""

    pk = models.CompositePrimaryKey("admitted_at", "request_id", "execution")  # of the event; a correction has the same
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    settled_at = models.DateTimeField(help_text="when it was written down")

    objects = TenantManager()

    class Meta:
        managed = False

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution}"


class UsageRollup(_Grouped, _Summed):
    """All changes admitted in an hour or a day and settled before `RollupState.settled_before`; can be made again."""

    class Bucket(models.TextChoices):
        HOUR = "hour"
        DAY = "day"

    bucket = models.CharField(max_length=4, choices=Bucket)
    start = models.DateTimeField()

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant_id", "bucket", "start", *GROUPED[1:]], name="rollup_once"),
        ]
        indexes: ClassVar = [models.Index(fields=["bucket", "start"], name="rollup_start")]

    def __str__(self) -> str:
        return f"{self.bucket} {self.start}: {self.model}"


class RollupState(models.Model):
    """One row: how far the rollups have come."""

    settled_before = models.DateTimeField()

    def __str__(self) -> str:
        return f"rollups up to {self.settled_before}"
