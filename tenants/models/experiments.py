"""Experiments on model names. Gateways read the running ones from compiled key snapshots."""

from __future__ import annotations

import secrets
from typing import ClassVar

import msgspec
from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager
from tenants.models.people import User
from tenants.models.tenancy import Tenant
from tenants.routing_policies.experiments import ExperimentArm, RunningExperiment

MAX_DAYS = 90


def new_seed() -> str:
    """Return a random key of an experiment's hash."""
    return secrets.token_hex(16)


class Experiment(models.Model):
    """A comparison of arms on the requests for a model name. Its arms never change after it has started."""

    class State(models.TextChoices):
        DRAFT = "draft"
        RUNNING = "running"
        STOPPED = "stopped"

    class Unit(models.TextChoices):
        END_USER = "end_user", "End user"
        CONVERSATION = "conversation", "Conversation"
        KEY = "key", "API key"
        METADATA = "metadata", "Metadata field"

    class StopReason(models.TextChoices):
        USER = "user", "Stopped by a user"
        HARM = "harm", "Stopped automatically: a guardrail was crossed"
        ENDED = "ended", "Planned end reached"

    AUDITED: ClassVar = (
        *("name", "model", "unit", "metadata_key", "arms", "primary_metric", "guardrails", "planned_days"),
        *("state", "stop_reason", "stop_metric"),
    )

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    name = models.CharField(max_length=64)
    model = models.CharField(max_length=64, help_text="the model name of the requests")
    unit = models.CharField(max_length=12, choices=Unit, default=Unit.END_USER)
    metadata_key = models.CharField(max_length=64, blank=True, default="")
    arms = models.JSONField(help_text="the first one is the control")
    primary_metric = models.CharField(max_length=16)
    guardrails = models.JSONField(
        default=dict, blank=True, help_text="metric -> the largest change for the worse that is allowed"
    )
    planned_days = models.IntegerField(default=14)
    state = models.CharField(max_length=8, choices=State, default=State.DRAFT)
    seed = models.CharField(max_length=32, default=new_seed)
    stop_reason = models.CharField(max_length=8, choices=StopReason, blank=True, default="")
    stop_metric = models.CharField(max_length=16, blank=True, default="", help_text="the guardrail that was crossed")
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    started_at = models.DateTimeField(null=True)
    stopped_at = models.DateTimeField(null=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant", "name"], name="experiment_name_unique"),
            models.UniqueConstraint(
                fields=["tenant", "model"], condition=Q(state="running"), name="experiment_one_running"
            ),
            models.CheckConstraint(condition=Q(planned_days__range=(1, MAX_DAYS)), name="experiment_days"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def arm_list(self) -> tuple[ExperimentArm, ...]:
        """The arms, the control first."""
        return msgspec.convert(self.arms, tuple[ExperimentArm, ...])

    @property
    def running(self) -> RunningExperiment:
        """The experiment as gateways read it."""
        return RunningExperiment(
            self.pk,
            self.unit,  # type: ignore[arg-type]
            self.seed,
            self.arm_list,
            self.metadata_key,
        )
