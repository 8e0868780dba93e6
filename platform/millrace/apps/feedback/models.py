"""Feedback on requests, written by gateways (millrace.gateway.http.endpoints.feedback)."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager


class SubmittedFeedback(models.Model):
    """A caller's feedback on a request. It is written once and never changed."""

    pk = models.CompositePrimaryKey("tenant_id", "request_id")
    tenant_id = models.BigIntegerField()
    request_id = models.CharField(max_length=64)
    key_id = models.BigIntegerField()  # the key that sent the feedback
    success = models.BooleanField(null=True)
    score = models.FloatField(null=True)  # from 0 to 1
    label = models.CharField(max_length=64, null=True)
    metadata = models.JSONField(null=True)
    reported_at = models.DateTimeField(db_default=models.functions.Now())

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(name="feedback_score", condition=Q(score__isnull=True) | Q(score__range=(0, 1))),
            models.CheckConstraint(
                name="feedback_not_empty",
                condition=Q(success__isnull=False) | Q(score__isnull=False) | Q(label__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"feedback on {self.request_id}"
