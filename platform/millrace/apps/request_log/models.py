"""The request log. It is telemetry; billing's usage events contain what was used and what it costs."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import F, Func, JSONField, Q, Value
from django.db.models.functions import Collate

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
            models.Index(F("request_id"), name="request_log_request"),
            # For searches by the beginning of an ID: in the collation C, these are a range.
            models.Index(F("tenant_id"), Collate("request_id", "C"), name="request_log_id_prefix"),
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
            BrinIndex(fields=["started_at"], name="request_log_started", autosummarize=True),
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


class ShadowComparison(models.Model):
    """The comparison of a request's answer with that of its shadow. Written once, when both have ended.

    Columns without `shadow` are of the answer that was returned. Times begin when the execution is dispatched.
    """

    pk = models.CompositePrimaryKey("tenant_id", "started_at", "request_id")
    tenant_id = models.BigIntegerField()
    started_at = models.DateTimeField(help_text="when the request was admitted")
    request_id = models.CharField(max_length=64)
    requested_model = models.CharField(max_length=128)
    policy_version = models.IntegerField()
    served_model = models.CharField(max_length=128)
    shadow_model = models.CharField(max_length=128)
    is_operator_paid = models.BooleanField()
    code = models.CharField(max_length=64, help_text="error code of a shadow without an answer; empty: it has answered")
    has_schema = models.BooleanField(help_text="whether the request asks for a structured output")
    failure = models.CharField(max_length=16, help_text="the first failed check; empty: all have passed")
    shadow_failure = models.CharField(max_length=16)
    output_tokens = models.IntegerField()
    shadow_output_tokens = models.IntegerField(null=True)
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0, null=True, help_text="by the tenant's prices")
    shadow_cost_femto = models.DecimalField(max_digits=38, decimal_places=0, null=True)
    ttft_ms = models.IntegerField(null=True)
    shadow_ttft_ms = models.IntegerField(null=True)
    total_ms = models.IntegerField(null=True)
    shadow_total_ms = models.IntegerField(null=True)

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["tenant_id", "requested_model", "started_at"], name="request_log_shadow_name"),
            BrinIndex(fields=["started_at"], name="request_log_shadow_started", autosummarize=True),
        ]

    def __str__(self) -> str:
        return f"shadow of {self.request_id}"


class SemanticEntry(models.Model):
    """A question that was computed, with its answer, for the semantic cache. Question and answer are encrypted."""

    tenant_id = models.BigIntegerField()
    scope = models.BinaryField(help_text="keyed digest of everything that must be equal: all but the last turn")
    question_digest = models.BinaryField(help_text="keyed digest of the question")
    vector = models.BinaryField(help_text="of the question, float16")
    answer_digest = models.BinaryField(help_text="keyed digest of the normalized answer")
    answer_vector = models.BinaryField(help_text="of the answer, float16; empty: the answer is too long")
    answer_group = models.BigIntegerField(help_text="equal for entries with the same answer")
    wrong = models.IntegerField(default=0, db_default=0, help_text="hits whose answer was wrong")
    request_id = models.CharField(max_length=64)
    question = models.BinaryField()
    answer = models.BinaryField()
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["tenant_id", "scope", "question_digest"], name="request_log_semantic_question"
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant_id", "id"], name="request_log_semantic_tenant"),
            models.Index(fields=["expires_at"], name="request_log_semantic_expires"),
        ]

    def __str__(self) -> str:
        return f"question of {self.request_id}"


class SemanticEvidence(models.Model):
    """The checks of a tenant's semantic cache in one band of margins."""

    tenant_id = models.BigIntegerField()
    embedding = models.CharField(max_length=200, help_text="the embedding deployment, with its version")
    band = models.SmallIntegerField()
    correct = models.IntegerField(default=0, db_default=0)
    wrong = models.IntegerField(default=0, db_default=0)
    updated_at = models.DateTimeField()

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant_id", "embedding", "band"], name="request_log_semantic_band"),
        ]

    def __str__(self) -> str:
        return f"band {self.band}: {self.correct} correct, {self.wrong} wrong"


class WarmedPrompt(models.Model):
    """A prompt that was computed ahead of its requests, as a line of a batch, to fill a cache.

    Until its cost is settled, `max_femto` counts toward the tenant's daily budget of cache warming.
    """

    class Cache(models.TextChoices):
        ANSWER = "answer"  # the answer cache
        PREFIX = "prefix"  # the prefix cache

    tenant_id = models.BigIntegerField()
    cache = models.CharField(max_length=6, choices=Cache)
    fingerprint = models.BinaryField(help_text="digest of the prompt and its parameters, or of the shared prefix")
    key_id = models.BigIntegerField(help_text="the API key that it ran with")
    model = models.CharField(max_length=128, help_text="the model that served the original request")
    source_request_id = models.CharField(max_length=64, help_text="the stored request that the prompt is from")
    batch_id = models.BigIntegerField()
    batch_line = models.IntegerField()
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(help_text="until when a request can use it")
    expected_femto = models.BigIntegerField(help_text="expected saving less the expected cost")
    max_femto = models.BigIntegerField(help_text="maximum cost")
    prefix_tokens = models.IntegerField(default=0, help_text="estimated length of the shared prefix")
    request_id = models.CharField(
        max_length=64, default="", help_text="the request that computed it; empty: it has not ended, or did not run"
    )
    cost_femto = models.BigIntegerField(null=True, help_text="empty: not settled")
    hits = models.IntegerField(default=0, help_text="requests that used it")
    saved_femto = models.BigIntegerField(
        default=0, help_text="what the first of these requests saved; the others would have been served without it"
    )

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["batch_id", "batch_line"], name="request_log_warmed_line"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant_id", "created_at"], name="request_log_warmed_created"),
        ]

    def __str__(self) -> str:
        return f"{self.cache} of {self.source_request_id}"
