"""Results of experiments, counted once from each request's record (millrace.apps.experiments.counting).

A trigger on the request log adds an `Observation` for each record with an arm. A trigger on feedback marks it as due
again.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager


class Observation(models.Model):
    """A request in an experiment, and what it has contributed to the sums so far."""

    pk = models.CompositePrimaryKey("tenant_id", "request_id")
    tenant_id = models.BigIntegerField()
    request_id = models.CharField(max_length=64)
    experiment_id = models.BigIntegerField()
    arm = models.SmallIntegerField()
    unit = models.CharField(max_length=32)
    started_at = models.DateTimeField()
    added_at = models.DateTimeField(db_default=models.functions.Now())
    due_at = models.DateTimeField(null=True, help_text="when it is counted, or counted again; null: counted")
    counted = models.JSONField(null=True, help_text="metric -> its count and sum; null: not counted yet")

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(
                fields=["experiment_id", "due_at"],
                condition=Q(due_at__isnull=False),
                name="experiments_observation_due",
            ),
            models.Index(fields=["added_at"], name="experiments_observation_added"),
        ]

    def __str__(self) -> str:
        return self.request_id


class UnitTotal(models.Model):
    """The sums of one unit in an experiment."""

    pk = models.CompositePrimaryKey("tenant_id", "experiment_id", "arm", "unit")
    tenant_id = models.BigIntegerField()
    experiment_id = models.BigIntegerField()
    arm = models.SmallIntegerField()
    unit = models.CharField(max_length=32)
    totals = models.JSONField(default=dict, help_text="metric -> its count and sum")

    objects = TenantManager()

    def __str__(self) -> str:
        return self.unit


class ArmTotal(models.Model):
    """The sums of an arm over its units, as exact integers."""

    pk = models.CompositePrimaryKey("tenant_id", "experiment_id", "arm")
    tenant_id = models.BigIntegerField()
    experiment_id = models.BigIntegerField()
    arm = models.SmallIntegerField()
    requests = models.BigIntegerField(default=0)
    moments = models.JSONField(default=dict, help_text="metric -> the fields of `Moments`")

    objects = TenantManager()

    def __str__(self) -> str:
        return f"arm {self.arm} of {self.experiment_id}"


class ExperimentPoint(models.Model):
    """The results of an experiment at the end of an hour, or now."""

    pk = models.CompositePrimaryKey("tenant_id", "experiment_id", "hour")
    tenant_id = models.BigIntegerField()
    experiment_id = models.BigIntegerField()
    hour = models.DateTimeField()
    requests = models.BigIntegerField()
    sample_ratio_p = models.FloatField(help_text="the smallest one so far")
    changes = models.JSONField(help_text="of each treatment: metric -> estimate, low, high; or null")

    objects = TenantManager()

    def __str__(self) -> str:
        return f"{self.experiment_id} at {self.hour}"
