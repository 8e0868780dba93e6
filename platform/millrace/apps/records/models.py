"""Requests as their gateways saw them. Telemetry: what was used and what it costs is in billing's usage events."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import F, Q

from tenants.isolation.scopes import TenantManager


class RequestOutcome(models.TextChoices):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"  # its caller left, or took it back
    FAILED = "failed"  # an internal error, or too much to do: 5xx, or a stream that broke off
    LIMITED = "limited"  # a limit, budget or quota did not allow it
    REFUSED = "refused"  # any other 4xx


class RequestRecord(models.Model):
    """One request for inference, accepted or refused, from the moment its key was known. Written once, at its end.

    Ids of project and key are no foreign keys: records outlive what they name. No record holds a prompt or an answer.
    A line of a batch that another gateway went on with has a record of each.
    """

    pk = models.CompositePrimaryKey("tenant_id", "at", "request_id")
    tenant_id = models.BigIntegerField()
    at = models.DateTimeField(help_text="when its key was known")
    request_id = models.CharField(max_length=64)
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()
    gateway_id = models.CharField(max_length=32)
    endpoint = models.CharField(max_length=32)
    asked = models.CharField(max_length=128, help_text="the model's name as it was asked for")
    served = models.CharField(max_length=128, help_text="the model that answered, or was tried last; empty: none")
    stream = models.BooleanField()
    status = models.CharField(max_length=64, help_text="HTTP's, stream_<code>, or nothing")
    code = models.CharField(max_length=64, help_text="of the error; empty: none")
    verdict = models.CharField(max_length=10, choices=RequestOutcome)
    bound = models.JSONField(null=True, help_text="the limit or budget that did not allow it")
    limits = models.JSONField(default=list, help_text="the limits checked, and what they left")
    windows = models.JSONField(default=list, help_text="of the budgets it was held from")
    route = models.JSONField(default=dict)
    placements = models.JSONField(default=list)
    prompts = models.SmallIntegerField(default=1)
    prompt_tokens = models.IntegerField(null=True)
    max_tokens = models.IntegerField(null=True, help_text="that the answer was allowed")
    hold_nano = models.BigIntegerField(null=True)
    price_version = models.BigIntegerField(null=True)
    total_ms = models.IntegerField()
    ttft_ms = models.IntegerField(null=True, help_text="from its arrival to its first token")
    dry_refused = models.SmallIntegerField(default=0, help_text="limits on trial that would have refused it")
    replay_of = models.CharField(max_length=64, default="", help_text="the request whose answer it was given")
    batch_id = models.BigIntegerField(null=True)
    batch_line = models.IntegerField(null=True)

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(F("request_id"), name="records_request"),
            models.Index(
                F("tenant_id"), F("at").desc(), condition=~Q(verdict="completed"), name="records_request_not_completed"
            ),
            models.Index(fields=["tenant_id", "replay_of"], condition=~Q(replay_of=""), name="records_request_replay"),
            BrinIndex(fields=["at"], name="records_request_at", autosummarize=True),
        ]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(name="records_request_verdict", condition=Q(verdict__in=RequestOutcome.values)),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}: {self.status}"


class RequestContent(models.Model):
    """The prompt and the answers of a request, stored for `Tenant.keep_content_days` days."""

    pk = models.CompositePrimaryKey("tenant_id", "request_id")
    tenant_id = models.BigIntegerField()
    request_id = models.CharField(max_length=64)
    at = models.DateTimeField()
    body = models.TextField(help_text="the request, JSON as it was sent")
    answers = models.JSONField(default=list, help_text="the texts generated")
    truncated = models.BooleanField(help_text="body or answers were longer than what is kept")

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["tenant_id", "at"], name="records_content_at")]

    def __str__(self) -> str:
        return f"content of {self.request_id}"
