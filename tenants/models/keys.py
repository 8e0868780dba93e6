"""API keys, what is compiled of them, and when they were last used."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models

from tenants.isolation.scopes import TenantManager
from tenants.keys import snapshot
from tenants.models.people import User
from tenants.models.tenancy import Project, Tenant


class ApiKey(models.Model):
    """A key for the API. The secret is shown once and never stored: `key_hash` finds it, `prefix` tells it apart.

    That the project is the tenant's is a rule of the database (a composite foreign key).
    """

    AUDITED: ClassVar = (
        "name",
        "prefix",
        "project_id",
        "scopes",
        "allowed_models",
        "allowed_addresses",
        "expires_at",
        "revoked_at",
        "replaces_id",
    )

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="keys")
    name = models.CharField(max_length=200)
    prefix = models.CharField(max_length=20)
    key_hash = models.BinaryField(max_length=32, unique=True)
    pepper = models.CharField(max_length=8, default="", db_default="")  # which one is in the hash; empty: none yet
    scopes = ArrayField(models.CharField(max_length=20))
    allowed_models = ArrayField(models.CharField(max_length=64), null=True, blank=True)  # None: all
    allowed_addresses = ArrayField(models.CharField(max_length=43), null=True, blank=True)  # networks; None: all
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    replaces = models.ForeignKey("self", on_delete=models.SET_NULL, null=True, blank=True, related_name="+")

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["id", "tenant"], name="key_of_tenant"),  # what limits refer to
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    @property
    def is_live(self) -> bool:
        expired = self.expires_at is not None and self.expires_at <= datetime.now(UTC)
        return self.revoked_at is None and not expired


class KeySnapshot(models.Model):
    """A key compiled for the data plane (`tenants.keys.snapshot`), found by the key's hash. Written by actions only."""

    key_hash = models.BinaryField(max_length=32, primary_key=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    key = models.OneToOneField(ApiKey, on_delete=models.CASCADE, related_name="compiled")
    version = models.BigIntegerField()
    payload = models.BinaryField()

    objects = TenantManager()

    def __str__(self) -> str:
        return f"snapshot of key {self.key_id}, version {self.version}"

    def decoded(self) -> snapshot.ApiKeySnapshot:
        return snapshot.decode(bytes(self.payload))


class KeyUse(models.Model):
    """When a key was last used: a table of its own, so that writing it never waits for a change of the key.

    Gateways write it in batches (`tenants.outbox.change_feed.RECORD_USE`)."""

    key = models.OneToOneField(ApiKey, on_delete=models.CASCADE, primary_key=True, related_name="use")
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    last_used_at = models.DateTimeField()

    objects = TenantManager()

    def __str__(self) -> str:
        return f"key {self.key_id}, last used {self.last_used_at}"
