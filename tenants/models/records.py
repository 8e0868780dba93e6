"""The audit log, the change feed, and stored responses of idempotent calls."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models

from tenants.isolation.scopes import TenantManager


class AuditEntry(models.Model):
    """An entry of the audit log: the actor, the action, the object, and values before and after.

    Entries can only be added; triggers reject updates and deletions. An entry outlives the objects that it names, so
    IDs are not foreign keys and names are those at that time. `tenant_id` is null if the action concerns no tenant.
    """

    created_at = models.DateTimeField(auto_now_add=True)
    tenant_id = models.BigIntegerField(null=True)
    action = models.CharField(max_length=64)
    actor_user_id = models.BigIntegerField(null=True)
    actor_key_id = models.BigIntegerField(null=True)
    actor = models.CharField(max_length=254)
    ip_address = models.GenericIPAddressField(null=True)
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
        return f"{self.action} by {self.actor}"


class Xid8Field(models.Field):  # type: ignore[type-arg]
    """A transaction's 64-bit number, which PostgreSQL assigns."""

    def db_type(self, connection: Any) -> str:
        return "xid8"

    def from_db_value(self, value: Any, *_: Any) -> int | None:
        return None if value is None else int(value)


class ChangeEventRow(models.Model):
    """A row of the change feed: gateways must read a key, or all keys of a tenant, again.

    See `tenants.outbox.change_feed`.
    """

    class ChangeType(models.TextChoices):
        CREDENTIAL = "credential"
        KEY = "key"
        LIMITS = "limits"
        MEMBER = "member"
        POLICY = "policy"
        TENANT = "tenant"

    xid = Xid8Field(db_default=models.Func(function="pg_current_xact_id"))
    created_at = models.DateTimeField(db_default=models.functions.Now())
    change_type = models.CharField(max_length=10, choices=ChangeType)
    tenant_id = models.BigIntegerField()
    key_id = models.BigIntegerField(null=True)  # None: all keys of the tenant

    objects = TenantManager()

    class Meta:
        db_table = "tenants_changeevent"
        indexes: ClassVar = [
            models.Index(fields=["xid"], name="change_event_xid"),
            models.Index(fields=["created_at"], name="change_event_created"),
        ]

    def __str__(self) -> str:
        return f"change {self.pk}: {self.change_type} of tenant {self.tenant_id}"


class IdempotentResponse(models.Model):
    """The response of a POST with an `Idempotency-Key`. While the first call runs, the row has no response.

    The console stores the results of forms that create secrets here (`frontend.core.one_time_secrets`).
    """

    tenant_id = models.BigIntegerField(null=True)
    caller = models.CharField(max_length=40)  # `key:<id>`, `user:<id>` or `console:<user id>`
    name = models.CharField(max_length=255)  # hash of the header's value
    request_hash = models.BinaryField(max_length=32)
    status = models.SmallIntegerField(null=True)
    body = models.BinaryField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["caller", "name"], name="idempotent_response_once")
        ]
        indexes: ClassVar = [models.Index(fields=["created_at"], name="idempotent_response_created")]

    def __str__(self) -> str:
        return f"{self.caller} {self.name}"
