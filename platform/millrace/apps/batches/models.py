"""Files, batches, and the lines of unfinished batches.

Gateways create files and batches and answer lines. The web jobs (millrace.apps.batches.tasks) load a batch's lines and
write its results. A batch outlives its tenant, project and key, so their IDs are not foreign keys.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from tenants.isolation.scopes import TenantManager


class File(models.Model):
    """A file of a project. millrace.apps.batches.storage stores its contents under its name."""

    class Purpose(models.TextChoices):
        BATCH = "batch"
        BATCH_OUTPUT = "batch_output"
        MESSAGES = "messages"  # requests of a message batch (Anthropic); hidden from the customer
        MESSAGES_OUTPUT = "messages_output"

    name = models.CharField(max_length=64, unique=True)  # `file-…`
    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=20, choices=Purpose)
    size = models.BigIntegerField()  # bytes
    is_internal = models.BooleanField(default=False, db_default=False)  # made by cache warming; hidden from customers
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
    """Requests of one file, which run within a day or expire."""

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
    key_id = models.BigIntegerField()  # the key that its lines use
    dialect = models.CharField(max_length=10, choices=[("openai", "OpenAI"), ("anthropic", "Anthropic")])
    endpoint = models.CharField(max_length=64)
    is_internal = models.BooleanField(default=False, db_default=False)  # as its files
    status = models.CharField(max_length=12, choices=Status, db_default=Status.VALIDATING)
    metadata = models.JSONField(null=True)
    errors = models.JSONField(null=True)  # problems of the input file: OpenAI's list of {code, line, message, param}
    input_file = models.CharField(max_length=64)  # names of files, which may be deleted
    output_file = models.CharField(max_length=64, null=True)
    error_file = models.CharField(max_length=64, null=True)
    usage = models.JSONField(null=True)  # tokens of the answered lines, as OpenAI's batches report them; set at the end
    output_seconds = models.IntegerField(null=True)  # retention of the result files; None: the default
    total = models.IntegerField(db_default=0)
    # Number of lines by how they ended; set when the batch ends.
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
    """A request of an unfinished batch: its position in the input file, and its answer.

    NOTE: only the lease's owner may answer a line. Each change is conditional on `runner_id` and `request_id`: if two
    gateways run the same line, one answer is stored.
    """

    class State(models.TextChoices):
        PENDING = "pending"
        RUNNING = "running"  # leased by the gateway `runner_id` until `lease_expires_at`
        ANSWERED = "answered"

    pk = models.CompositePrimaryKey("batch_id", "number")
    batch = models.ForeignKey(Batch, models.CASCADE, related_name="lines", db_index=False)
    number = models.IntegerField()  # from 0
    tenant_id = models.BigIntegerField()
    custom_id = models.TextField()
    byte_offset = models.BigIntegerField()  # start of its JSON in the input file
    size = models.IntegerField()  # bytes of its JSON
    state = models.CharField(max_length=8, choices=State, db_default=State.PENDING)
    runner_id = models.CharField(max_length=64, null=True)
    lease_expires_at = models.DateTimeField(null=True)
    not_before = models.DateTimeField(null=True)
    lost_count = models.SmallIntegerField(db_default=0)  # workers that were lost while they ran it
    request_id = models.CharField(max_length=64, null=True)
    status = models.SmallIntegerField(null=True)  # HTTP status
    answer = models.BinaryField(null=True)  # JSON body

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
            models.Index(
                fields=["batch", "lease_expires_at"], condition=Q(state="running"), name="batches_line_running"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.batch_id}/{self.number}"
