"""Comparisons of answers with those of shadows.

The tables are those of the app `request_log`, which has the migrations.
"""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.indexes import BrinIndex
from django.db import models

from tenants.isolation.scopes import TenantManager


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
        app_label = "request_log"
        indexes: ClassVar = [
            models.Index(fields=["tenant_id", "requested_model", "started_at"], name="request_log_shadow_name"),
            BrinIndex(fields=["started_at"], name="request_log_shadow_started", autosummarize=True),
        ]

    def __str__(self) -> str:
        return f"shadow of {self.request_id}"
