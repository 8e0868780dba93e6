"""Jobs of tenants: slow work of the management API that web jobs do. See `tenants.jobs`."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager
from tenants.models.tenancy import Tenant
from tenants.text_field import UserTextField


class TenantJob(models.Model):
    """A job of a tenant: its parameters, its state and, when it has ended, its result or error."""

    class Status(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        COMPLETED = "completed"
        FAILED = "failed"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    kind = models.CharField(max_length=64, help_text="what the job does, such as cache-warming.run")
    permission = models.CharField(max_length=32, help_text="needed to see the job")
    parameters = models.JSONField(default=dict)
    actor = models.JSONField(help_text="fields of the `tenants.audit.Actor` who started it")
    status = models.CharField(max_length=9, choices=Status, default=Status.QUEUED)
    attempts = models.SmallIntegerField(default=0, help_text="runs, of which all but the last were interrupted")
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    error = UserTextField(blank=True, help_text="why it failed, for the user")
    result = models.TextField(blank=True)
    content_type = models.CharField(max_length=64, blank=True, help_text="of the result")
    filename = models.CharField(max_length=128, blank=True, help_text="of a result that is a file")

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["tenant", "-id"], name="tenant_job_newest"),
            models.Index(fields=["id"], condition=Q(status__in=("queued", "running")), name="tenant_job_open"),
            models.Index(fields=["created_at"], name="tenant_job_created"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.pk}"
