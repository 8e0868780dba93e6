"""Upstream credentials: encrypted secrets of the platform and of tenants for other servers."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager
from tenants.models.tenancy import Tenant

MAX_SECRET_LENGTH = 8192


class UpstreamCredential(models.Model):
    """A secret that authenticates requests to upstreams.

    Without a tenant, it belongs to the platform, and deployments name it. A tenant's own one replaces the deployment's
    in the tenant's requests for `model_names`. The secret is stored encrypted (tenants.credentials.encryption).
    """

    AUDITED: ClassVar = ("name", "model_names", "daily_spend_limit_nano", "max_concurrency", "version")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, null=True)
    name = models.CharField(max_length=64)
    model_names = ArrayField(models.CharField(max_length=64), default=list, blank=True, help_text="only of a tenant's")
    ciphertext = models.BinaryField()
    encryption_key_id = models.CharField(max_length=8, help_text="of the key in MILLRACE_CREDENTIAL_KEYS")
    version = models.IntegerField(default=1, help_text="increases by 1 with each rotation of the secret")
    daily_spend_limit_nano = models.BigIntegerField(null=True, help_text="nano-USD per day (UTC); null: no limit")
    max_concurrency = models.IntegerField(null=True, help_text="concurrent requests of all replicas; null: no limit")
    created_at = models.DateTimeField(auto_now_add=True)
    rotated_at = models.DateTimeField(null=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar = ["-id"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "name"], nulls_distinct=False, name="upstream_credential_name"),
            models.CheckConstraint(
                name="upstream_credential_limits",
                condition=(Q(daily_spend_limit_nano__isnull=True) | Q(daily_spend_limit_nano__gte=0))
                & (Q(max_concurrency__isnull=True) | Q(max_concurrency__gte=1)),
            ),
        ]

    def __str__(self) -> str:
        return self.name
