"""What is written down of changes: for people (the audit log) and for gateways (the change log)."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models

from tenants.isolation.scopes import TenantManager


class AuditEntry(models.Model):
    """Who changed what, when and from where. Only ever added to: triggers refuse the rest.

    Ids are no foreign keys, and names are as they were then: entries outlive what they name. `tenant_id` is null for
    what concerns no tenant.
    """

    at = models.DateTimeField(auto_now_add=True)
    tenant_id = models.BigIntegerField(null=True)
    verb = models.CharField(max_length=64)
    actor_user_id = models.BigIntegerField(null=True)
    actor_key_id = models.BigIntegerField(null=True)
    actor = models.CharField(max_length=254)
    address = models.GenericIPAddressField(null=True)
    request_id = models.CharField(max_length=64, blank=True)
    object_type = models.CharField(max_length=40)
    object_id = models.BigIntegerField(null=True)
    object_name = models.CharField(max_length=254)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        indexes: ClassVar = [
            models.Index(fields=["tenant_id", "-id"], name="audit_tenant"),
            models.Index(fields=["tenant_id", "object_type", "object_id"], name="audit_object"),
        ]

    def __str__(self) -> str:
        return f"{self.verb} by {self.actor}"


class Xid8Field(models.Field):  # type: ignore[type-arg]
    """A transaction's 64-bit number, which PostgreSQL assigns."""

    def db_type(self, connection: Any) -> str:
        return "xid8"

    def from_db_value(self, value: Any, *_: Any) -> int | None:
        return None if value is None else int(value)


class ChangeLog(models.Model):
    """Tells gateways that what they hold of a key, or of all keys of a tenant, is old. See
    `tenants.outbox.change_feed`."""

    class Kind(models.TextChoices):
        KEY = "key"
        LIMITS = "limits"
        MEMBER = "member"
        POLICY = "policy"
        TENANT = "tenant"

    xid = Xid8Field(db_default=models.Func(function="pg_current_xact_id"))
    at = models.DateTimeField(db_default=models.functions.Now())
    kind = models.CharField(max_length=10, choices=Kind)
    tenant_id = models.BigIntegerField()
    key_id = models.BigIntegerField(null=True)  # None: all keys of the tenant

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["xid"], name="change_xid"),
            models.Index(fields=["at"], name="change_at"),
        ]

    def __str__(self) -> str:
        return f"change {self.pk}: {self.kind} of tenant {self.tenant_id}"


class IdempotentAnswer(models.Model):
    """The stored answer of a POST with an `Idempotency-Key`; without one while the first call still runs."""

    tenant_id = models.BigIntegerField(null=True)
    caller = models.CharField(max_length=40)  # `key:<id>` or `user:<id>`
    name = models.CharField(max_length=255)  # what the caller sent
    request_hash = models.BinaryField(max_length=32)
    status = models.SmallIntegerField(null=True)
    body = models.BinaryField(null=True)
    at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["caller", "name"], name="idempotency_once")
        ]
        indexes: ClassVar = [models.Index(fields=["at"], name="idempotency_at")]

    def __str__(self) -> str:
        return f"{self.caller} {self.name}"
