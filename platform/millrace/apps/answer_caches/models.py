"""The semantic cache and its checks, and the prompts of cache warming.

The tables are those of the app `request_log`, which has the migrations.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from tenants.isolation.scopes import TenantManager


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
        app_label = "request_log"
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
        app_label = "request_log"
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
        app_label = "request_log"
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["batch_id", "batch_line"], name="request_log_warmed_line"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant_id", "created_at"], name="request_log_warmed_created"),
        ]

    def __str__(self) -> str:
        return f"{self.cache} of {self.source_request_id}"
