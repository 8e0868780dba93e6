"""What operators decided about workers, and what was seen of them. No tenant's: its role sees none of these rows."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import Q


class Cordon(models.Model):
    """A worker that gets no new work. By its name, so that it outlives a restart; `drain`: it gives back what it has
    not begun. The broker holds a copy, which gateways and workers go by (millrace.apps.operations.cordons)."""

    AUDITED: ClassVar = ("worker", "drain", "why")

    worker = models.CharField(max_length=128, unique=True)
    drain = models.BooleanField(default=False)
    why = models.CharField(max_length=200, blank=True)
    by = models.CharField(max_length=254)
    since = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.worker


class MachineCost(models.Model):
    """What a machine that serves a model costs."""

    AUDITED: ClassVar = ("model", "nano_per_hour")

    model = models.CharField(max_length=128, unique=True)
    nano_per_hour = models.BigIntegerField(help_text="nano-USD an hour for each replica")

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="machine_cost_whole", condition=Q(nano_per_hour__range=(0, 10**15)))
        ]

    def __str__(self) -> str:
        return self.model


class ReplicaMinute(models.Model):
    """How a replica was once a minute. Counts are those since its start, so that a minute nobody saw is not lost."""

    pk = models.CompositePrimaryKey("at", "replica_id")
    at = models.DateTimeField(help_text="the minute")
    replica_id = models.CharField(max_length=128)
    worker = models.CharField(max_length=128)
    model = models.CharField(max_length=128)
    beat = models.BigIntegerField(help_text="the heartbeat that told it")
    running = models.IntegerField()
    waiting = models.IntegerField()
    max_batch = models.IntegerField()
    kv_blocks = models.IntegerField()
    kv_blocks_used = models.IntegerField()
    cores = models.IntegerField()
    cpu_ms = models.BigIntegerField()
    forward_ms = models.BigIntegerField(help_text="spent in forward passes")
    steps = models.BigIntegerField()
    batched_sequences = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    generation_tokens = models.BigIntegerField()
    cache_queries = models.BigIntegerField()
    cache_hits = models.BigIntegerField()
    preemptions = models.BigIntegerField()
    mfu = models.IntegerField(null=True, help_text="hundredths of a percent of the peak; null: the peak is not known")
    ttft = ArrayField(models.BigIntegerField(), help_text="requests by time to their first token, as in the histogram")

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["worker", "at"], name="replica_minute_worker"),
            BrinIndex(fields=["at"], name="replica_minute_at", autosummarize=True),
        ]

    def __str__(self) -> str:
        return f"{self.replica_id} at {self.at:%F %H:%M}"


class HealthEvent(models.Model):
    """Something that needed a person, from when it was first seen until it was over."""

    kind = models.CharField(max_length=20)
    subject = models.CharField(max_length=128, help_text="which of its kind")
    urgent = models.BooleanField()
    title = models.CharField(max_length=250)
    tenant_id = models.BigIntegerField(null=True)
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering: ClassVar = ["-id"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["kind", "subject"], condition=Q(closed_at__isnull=True), name="health_event_open_once"
            )
        ]
        indexes: ClassVar = [models.Index(fields=["closed_at"], name="health_event_closed")]

    def __str__(self) -> str:
        return self.title
