"""Files, batches, and the lines of batches that are not finished.

Gateways make files and batches and answer lines; the web jobs (millrace.apps.batches.tasks) read a batch's lines in and
write its results out. Ids of tenant, project and key are no foreign keys: batches outlive what they name.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from tenants.isolation.scopes import TenantManager


class File(models.Model):
    """A file of a project. Its contents lie in the files' folder under its name (millrace.apps.batches.storage)."""

    class Purpose(models.TextChoices):
        BATCH = "batch"
        BATCH_OUTPUT = "batch_output"
        MESSAGES = "messages"  # what Anthropic's message batches are kept in: not a file to the customer
        MESSAGES_OUTPUT = "messages_output"

    name = models.CharField(max_length=64, unique=True)  # `file-…`
    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=20, choices=Purpose)
    size = models.BigIntegerField()  # bytes
    created_at = models.DateTimeField(db_default=models.functions.Now())
    expires_at = models.DateTimeField()

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(F("tenant_id"), F("project_id"), F("id").desc(), name="batches_file_project"),
            models.Index(fields=["expires_at"], name="batches_file_expiry"),
        ]

    def __str__(self) -> str:
        return self.name


class Batch(models.Model):
    """Requests of one file, answered within a day or not at all."""

    class Status(models.TextChoices):
        VALIDATING = "validating"
        FAILED = "failed"
        IN_PROGRESS = "in_progress"
        FINALIZING = "finalizing"
        COMPLETED = "completed"
        EXPIRED = "expired"
        CANCELLING = "cancelling"
        CANCELLED = "cancelled"

    name = models.CharField(max_length=64, unique=True)  # `batch_…` or `msgbatch_…`
    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()  # on which the lines run
    dialect = models.CharField(max_length=10, choices=[("openai", "OpenAI"), ("anthropic", "Anthropic")])
    endpoint = models.CharField(max_length=64)
    status = models.CharField(max_length=12, choices=Status, db_default=Status.VALIDATING)
    metadata = models.JSONField(null=True)
    errors = models.JSONField(null=True)  # why it failed: OpenAI's list of {code, line, message, param}
    input_file = models.CharField(max_length=64)  # names of files, which may be gone
    output_file = models.CharField(max_length=64, null=True)
    error_file = models.CharField(max_length=64, null=True)
    output_seconds = models.IntegerField(null=True)  # how long its results are kept, if it was said
    total = models.IntegerField(db_default=0)
    # How its lines ended, counted when the last of them had.
    succeeded = models.IntegerField(db_default=0)
    errored = models.IntegerField(db_default=0)
    cancelled = models.IntegerField(db_default=0)
    expired = models.IntegerField(db_default=0)
    created_at = models.DateTimeField(db_default=models.functions.Now())
    expires_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True)
    finalizing_at = models.DateTimeField(null=True)
    completed_at = models.DateTimeField(null=True)
    failed_at = models.DateTimeField(null=True)
    expired_at = models.DateTimeField(null=True)
    cancelling_at = models.DateTimeField(null=True)
    cancelled_at = models.DateTimeField(null=True)

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(F("tenant_id"), F("project_id"), F("id").desc(), name="batches_batch_project"),
            models.Index(
                fields=["id"],
                condition=Q(status__in=["validating", "in_progress", "finalizing", "cancelling"]),
                name="batches_batch_live",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Line(models.Model):
    """One request of a batch that is not finished: a part of its input file, and its answer once there is one.

    NOTE: a line is answered by its lease holder: each change is conditional on `runner` and `request_id`, so of two
    gateways that both believe they run it, one is heard.
    """

    class State(models.TextChoices):
        PENDING = "pending"
        RUNNING = "running"  # by the gateway `runner`, until `lease` at least
        ANSWERED = "answered"

    pk = models.CompositePrimaryKey("batch_id", "number")
    batch = models.ForeignKey(Batch, models.CASCADE, related_name="lines", db_index=False)
    number = models.IntegerField()  # from 0 on
    tenant_id = models.BigIntegerField()
    custom_id = models.TextField()
    place = models.BigIntegerField()  # where its JSON begins in the input file
    size = models.IntegerField()  # and its length, in bytes
    state = models.CharField(max_length=8, choices=State, db_default=State.PENDING)
    runner = models.CharField(max_length=64, null=True)
    lease = models.DateTimeField(null=True)
    not_before = models.DateTimeField(null=True)
    losses = models.SmallIntegerField(db_default=0)  # workers that died with it
    request_id = models.CharField(max_length=64, null=True)
    status = models.SmallIntegerField(null=True)  # HTTP's
    answer = models.BinaryField(null=True)  # the body, JSON

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                name="batches_line_answer",
                condition=Q(state="answered", status__isnull=False, answer__isnull=False)
                | (~Q(state="answered") & Q(answer__isnull=True)),
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["batch", "number"], condition=Q(state="pending"), name="batches_line_pending"),
            models.Index(fields=["batch", "lease"], condition=Q(state="running"), name="batches_line_running"),
        ]

    def __str__(self) -> str:
        return f"{self.batch_id}/{self.number}"
