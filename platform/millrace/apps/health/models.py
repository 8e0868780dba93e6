"""Cordons, machine costs, samples of replicas, health events, and the lease of the active beat.

Tenants' database role cannot read these rows.
"""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import Q

from billing.currencies.amounts import NANO_A_DOLLAR
from tenants.text_field import UserTextField

MAX_NANO_PER_HOUR = 1_000_000 * NANO_A_DOLLAR  # more is a typing error


class Cordon(models.Model):
    """An operator's mark that sends a worker no new work.

    It names the worker, so it also applies after a restart. With `drain`, the worker returns work that it has not
    started. Gateways and workers read a copy in Valkey (millrace.apps.health.cordons).
    """

    AUDITED: ClassVar = ("worker", "drain", "reason")

    worker = models.CharField(max_length=128, unique=True)
    drain = models.BooleanField(default=False)
    reason = models.CharField(max_length=200, blank=True)
    cordoned_by = models.CharField(max_length=254)
    cordoned_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.worker


class MachineCost(models.Model):
    """The hourly cost of a machine that serves a model."""

    AUDITED: ClassVar = ("model", "nano_per_hour")

    model = models.CharField(max_length=128, unique=True)
    nano_per_hour = models.BigIntegerField(help_text="nano-USD per hour and replica")

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="machine_cost_range", condition=Q(nano_per_hour__range=(0, MAX_NANO_PER_HOUR)))
        ]

    def __str__(self) -> str:
        return self.model


class ReplicaSample(models.Model):
    """The state of a replica, sampled once a minute. Counters count from the replica's start, so gaps lose nothing."""

    pk = models.CompositePrimaryKey("sampled_at", "replica_id")
    sampled_at = models.DateTimeField(help_text="the minute")
    replica_id = models.CharField(max_length=128)
    worker = models.CharField(max_length=128)
    model = models.CharField(max_length=128)
    heartbeat_at = models.BigIntegerField(help_text="the value of the heartbeat that was read")
    running = models.IntegerField()
    waiting = models.IntegerField()
    max_num_seqs = models.IntegerField()
    kv_blocks = models.IntegerField()
    kv_blocks_used = models.IntegerField()
    cores = models.IntegerField()
    cpu_ms = models.BigIntegerField()
    forward_ms = models.BigIntegerField(help_text="time in forward passes")
    steps = models.BigIntegerField()
    batched_sequences = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    generation_tokens = models.BigIntegerField()
    cache_queries = models.BigIntegerField()
    cache_hits = models.BigIntegerField()
    preemptions = models.BigIntegerField()
    mfu = models.IntegerField(null=True, help_text="hundredths of a percent of the peak; null: unknown peak")
    ttft = ArrayField(models.BigIntegerField(), help_text="the histogram's counts of times to the first token")

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["worker", "sampled_at"], name="replica_sample_worker"),
            BrinIndex(fields=["sampled_at"], name="replica_sample_sampled", autosummarize=True),
        ]

    def __str__(self) -> str:
        return f"{self.replica_id} at {self.sampled_at:%F %H:%M}"


class HealthEvent(models.Model):
    """A health issue, from when it was first found until it was resolved."""

    issue_type = models.CharField(max_length=20)
    subject = models.CharField(max_length=128, help_text="the object with the issue")
    urgent = models.BooleanField()
    title = UserTextField()
    tenant_id = models.BigIntegerField(null=True)
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering: ClassVar = ["-id"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["issue_type", "subject"], condition=Q(closed_at__isnull=True), name="health_event_open_once"
            )
        ]
        indexes: ClassVar = [models.Index(fields=["closed_at"], name="health_event_closed")]

    def __str__(self) -> str:
        return self.title


class BeatLease(models.Model):
    """The right to send periodic tasks, in one row. Of several beats, its holder is active (millrace.conf.active_beat).

    A row instead of a lock of a database session, which does not work behind PgBouncer.
    """

    id = models.SmallIntegerField(primary_key=True)
    holder = models.CharField(max_length=128, help_text="host and process")
    place = models.CharField(max_length=64, null=True, help_text="the lock file that the holder has locked")
    fencing_number = models.BigIntegerField(help_text="increases each time that a beat takes the lease")
    expires_at = models.DateTimeField()
    last_runs = models.JSONField(default=dict, help_text="name of each entry -> when its task was sent last")

    class Meta:
        constraints: ClassVar = [models.CheckConstraint(name="beat_lease_single_row", condition=Q(id=1))]

    def __str__(self) -> str:
        return f"{self.holder}, fencing number {self.fencing_number}"
