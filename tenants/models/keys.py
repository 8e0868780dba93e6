"""API keys, their snapshots, and when they were last used."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models

from tenants.isolation.scopes import TenantManager
from tenants.keys import snapshot
from tenants.models.people import User
from tenants.models.tenancy import Project, Tenant
from tenants.one_line_text import check_line

MAX_COST_CENTER_LENGTH = 60


class ApiKey(models.Model):
    """An API key. The secret is shown once and never stored; `key_hash` is its hash, `prefix` identifies it for users.

    A composite foreign key ensures that the project belongs to the tenant.
    """

    AUDITED: ClassVar = (
        "name",
        "prefix",
        "project_id",
        "scopes",
        "allowed_models",
        "allowed_ip_ranges",
        "cost_center",
        "expires_at",
        "revoked_at",
        "replaces_id",
    )

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="keys")
    name = models.CharField(max_length=200)
    prefix = models.CharField(max_length=20)
    key_hash = models.BinaryField(max_length=32, unique=True)
    pepper = models.CharField(max_length=8, default="", db_default="")  # ID of the pepper in the hash; empty: none
    scopes = ArrayField(models.CharField(max_length=20))
    allowed_models = ArrayField(models.CharField(max_length=64), null=True, blank=True)  # None: all
    allowed_ip_ranges = ArrayField(models.CharField(max_length=43), null=True, blank=True)  # CIDR; None: all
    cost_center = models.CharField(
        max_length=MAX_COST_CENTER_LENGTH,
        blank=True,
        default="",
        db_default="",
        validators=[check_line],
        help_text="by which invoices divide the usage; empty: none",
    )
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    replaces = models.ForeignKey("self", on_delete=models.SET_NULL, null=True, blank=True, related_name="+")

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["id", "tenant"], name="key_of_tenant"
            ),  # the target of composite foreign keys
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    @property
    def is_live(self) -> bool:
        expired = self.expires_at is not None and self.expires_at <= datetime.now(UTC)
        return self.revoked_at is None and not expired


class ApiKeySnapshotRow(models.Model):
    """The compiled snapshot of a key (`tenants.keys.snapshot`), by the key's hash. Only actions write it."""

    key_hash = models.BinaryField(max_length=32, primary_key=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    key = models.OneToOneField(ApiKey, on_delete=models.CASCADE, related_name="snapshot")
    version = models.BigIntegerField()
    payload = models.BinaryField()

    objects = TenantManager()

    class Meta:
        db_table = "tenants_apikeysnapshot"

    def __str__(self) -> str:
        return f"snapshot of key {self.key_id}, version {self.version}"

    def decode(self) -> snapshot.ApiKeySnapshot:
        return snapshot.decode(bytes(self.payload))


class ApiKeyUsage(models.Model):
    """The time of a key's last use. It is a separate table so that writes do not wait for changes of the key.

    Gateways write it in batches (`tenants.outbox.change_feed.RECORD_USAGE`).
    """

    key = models.OneToOneField(ApiKey, on_delete=models.CASCADE, primary_key=True, related_name="usage")
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    last_used_at = models.DateTimeField()

    objects = TenantManager()

    def __str__(self) -> str:
        return f"key {self.key_id}, last used {self.last_used_at}"
