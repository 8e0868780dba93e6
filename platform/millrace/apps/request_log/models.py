"""The request log. It is telemetry; billing's usage events contain what was used and what it costs."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Func, JSONField, Q, Value

from tenants.isolation.scopes import TenantManager


class RequestOutcome(models.TextChoices):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"  # the caller disconnected or cancelled it
    FAILED = "failed"  # internal error or overload: a 5xx status, or an interrupted stream
    LIMITED = "limited"  # rejected by a rate limit, budget or quota
    REFUSED = "refused"  # any other 4xx


class CacheLayer(models.TextChoices):
    """The origin of a request's answer."""

    EXACT = "exact"  # a cached answer
    SINGLE_FLIGHT = "single_flight"  # the answer of an equal concurrent request
    SEMANTIC = "semantic"  # the cached answer to a similar question
    PREFIX = "prefix"  # computed, with a part of the prompt from the prefix cache
    HOST_MEMORY = "host_memory"  # the same, from its part in CPU memory; only in sums, a record has `prefix`
    COMPUTED = "computed"


class RequestRecord(models.Model):
    """An inference request whose key was valid, accepted or rejected. Written once, when the request ends.

    A record outlives its project and key, so their IDs are not foreign keys. Records contain no prompts or completions.
    If another gateway continued a line of a batch, the line has a record of each gateway.

    The table is partitioned by the UTC day of `started_at` (`day_partitions`). Rows of two partitions can have the same
    `ctid`.
    """

    pk = models.CompositePrimaryKey("tenant_id", "started_at", "request_id")
    tenant_id = models.BigIntegerField()
    started_at = models.DateTimeField(help_text="when the key was authenticated")
    request_id = models.CharField(max_length=64)
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()
    gateway_id = models.CharField(max_length=32)
    endpoint = models.CharField(max_length=32)
    requested_model = models.CharField(max_length=128, help_text="the model name in the request")
    served_model = models.CharField(max_length=128, help_text="the model that answered, or the last attempted one")
    stream = models.BooleanField()
    status = models.CharField(max_length=64, help_text="HTTP status, stream_<code>, or nothing")
    code = models.CharField(max_length=64, help_text="error code; empty: no error")
    outcome = models.CharField(max_length=10, choices=RequestOutcome)
    limited_by = models.JSONField(null=True, help_text="the limit or budget that rejected the request")
    limits = models.JSONField(default=list, help_text="the checked limits, and what was left of each")
    budget_periods = models.JSONField(default=list, help_text="IDs of the budget periods with a reservation")
    route = models.JSONField(default=dict)
    placements = models.JSONField(default=list)
    prompts = models.SmallIntegerField(default=1)
    prompt_tokens = models.IntegerField(null=True)
    max_tokens = models.IntegerField(null=True, help_text="maximum tokens of the completion")
    reserved_nano = models.BigIntegerField(null=True)
    price_version = models.BigIntegerField(null=True)
    total_ms = models.IntegerField()
    ttft_ms = models.IntegerField(null=True, help_text="from the request's arrival to its first token")
    dry_run_rejections = models.SmallIntegerField(
        default=0, help_text="number of dry-run limits that would have rejected the request"
    )
    replay_of = models.CharField(max_length=64, default="", help_text="the request whose response was returned again")
    ignored = models.JSONField(
        default=list, db_default=Value([], JSONField()), help_text="request fields that were accepted without effect"
    )
    cache_layer = models.CharField(
        max_length=16, default="", db_default="", help_text="origin of the answer; empty: no usage is known"
    )
    cache_source = models.CharField(
        max_length=64, default="", db_default="", help_text="the request whose cached or concurrent answer was returned"
    )
    batch_id = models.BigIntegerField(null=True)
    batch_line = models.IntegerField(null=True)
    end_user = models.CharField(max_length=128, default="", db_default="", help_text="`user` of the request")
    failure = models.CharField(max_length=8, default="", db_default="", help_text="of the answer: schema or tool")
    retry_key = models.BigIntegerField(null=True, help_text="equal if the same end user sends the same prompt again")
    itl_us = models.IntegerField(null=True, help_text="mean time between tokens, in microseconds")
    experiment_id = models.BigIntegerField(null=True)
    experiment_arm = models.SmallIntegerField(null=True, help_text="number of the assigned arm")
    experiment_unit = models.CharField(max_length=32, default="", db_default="", help_text="hash of the assigned unit")

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            # Also for searches by the beginning of an ID.
            models.Index(
                fields=["tenant_id", "request_id"],
                name="request_log_id",
                opclasses=["int8_ops", "varchar_pattern_ops"],
            ),
            models.Index(
                F("tenant_id"),
                F("started_at").desc(),
                condition=~Q(outcome="completed"),
                name="request_log_not_completed",
            ),
            models.Index(
                fields=["tenant_id", "retry_key", "started_at"],
                condition=Q(retry_key__isnull=False),
                name="request_log_retry",
            ),
            models.Index(fields=["tenant_id", "replay_of"], condition=~Q(replay_of=""), name="request_log_replay"),
            # Statistics of a period read only this index.
            models.Index(
                fields=["tenant_id", "started_at"], include=["outcome", "ttft_ms"], name="request_log_outcome"
            ),
            models.Index(
                fields=["tenant_id", "started_at"],
                condition=Q(cache_layer__in=("exact", "semantic")),
                name="request_log_answer_hits",
            ),
        ]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(name="request_log_outcome_known", condition=Q(outcome__in=RequestOutcome.values)),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}: {self.status}"


class RequestRollup(models.Model):
    """The sums of a tenant's requests of a UTC day (`request_rollups`), which has fewer rows than requests."""

    pk = models.CompositePrimaryKey(
        "tenant_id", "day", "project_id", "served_model", "policy", "cache_layer", "answer_miss"
    )
    tenant_id = models.BigIntegerField()
    day = models.DateField()
    project_id = models.BigIntegerField()
    served_model = models.CharField(max_length=128)
    policy = models.TextField(help_text="name and version of the routing policy; empty: none")
    cache_layer = models.CharField(max_length=16, choices=CacheLayer)
    answer_miss = models.TextField(help_text="why the answer cache did not serve the request; empty: no miss")
    requests = models.BigIntegerField(help_text="that were tried")
    succeeded = models.BigIntegerField()
    feedback = models.BigIntegerField()
    bad_feedback = models.BigIntegerField()
    schema_failures = models.BigIntegerField()
    tool_failures = models.BigIntegerField()
    retried = models.BigIntegerField()
    cancelled = models.BigIntegerField()
    errors = models.BigIntegerField()
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0)
    layer_requests = models.BigIntegerField(help_text="with a known cache layer; the following columns are theirs")
    input_tokens = models.BigIntegerField()
    read_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    hit_input = models.BigIntegerField()
    hit_output = models.BigIntegerField()
    saved_femto = models.DecimalField(max_digits=38, decimal_places=0)
    host_tokens = models.BigIntegerField()
    misses = models.BigIntegerField(help_text="requests that the answer cache did not serve")

    objects = TenantManager()

    def __str__(self) -> str:
        return f"requests of {self.day}: {self.served_model}"


class ChangedDay(models.Model):
    """A day whose requests have changed after its end. Written by triggers, until the day is summed again."""

    tenant_id = models.BigIntegerField()
    day = models.DateField()
    changed_at = models.DateTimeField(db_default=Func(function="clock_timestamp"))

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["tenant_id", "day"], name="request_log_changed_day")]

    def __str__(self) -> str:
        return f"{self.day} of tenant {self.tenant_id}"


class RequestRollupState(models.Model):
    """The days that are summed, in one row: from `built_from`, before `built_until`."""

    built_from = models.DateField()
    built_until = models.DateField()

    def __str__(self) -> str:
        return f"requests of {self.built_from} to {self.built_until}"


class RequestContent(models.Model):
    """The prompt and the completions of a request, stored for `Tenant.content_retention_days` days."""

    pk = models.CompositePrimaryKey("tenant_id", "request_id")
    tenant_id = models.BigIntegerField()
    request_id = models.CharField(max_length=64)
    started_at = models.DateTimeField()
    body = models.TextField(help_text="the request's JSON body")
    answers = models.JSONField(default=list, help_text="the generated texts")
    truncated = models.BooleanField(help_text="whether the body or the answers were cut")
    digests = models.JSONField(
        null=True, help_text="for cache warming; null: not computed, empty: the prompt cannot be warmed"
    )

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["tenant_id", "started_at"], name="request_log_content_started")]

    def __str__(self) -> str:
        return f"content of {self.request_id}"
