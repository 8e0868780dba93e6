"""Notifications of members and operators, what they have read, and the channels that they chose for each kind."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Func, Q
from django.db.models.functions import Cast, Now

from tenants.isolation.scopes import TenantManager
from tenants.models.people import User
from tenants.models.tenancy import Tenant
from tenants.text_field import UserTextField

_TRANSACTION = Cast(
    Cast(Func(function="pg_current_xact_id", output_field=models.TextField()), models.TextField()),
    models.BigIntegerField(),
)


class Notification(models.Model):
    """An event that a member or an operator should know of, written in the transaction that causes it.

    `tenants.notifications.kinds` decides who sees it. Without a tenant, it is for operators. A tenant has one
    notification for each `deduplication_key`, and so have the operators.
    """

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, null=True, help_text="null: for operators")
    kind = models.CharField(max_length=32)
    deduplication_key = models.CharField(max_length=120, help_text="unique in the tenant")
    text = UserTextField()
    link = models.CharField(max_length=200, help_text="path of the object's page, below the tenant's or the operators'")
    actor_user_id = models.BigIntegerField(null=True, help_text="the user who caused it, who does not see it")
    xid = models.BigIntegerField(db_default=_TRANSACTION, help_text="number of the transaction that wrote it")
    created_at = models.DateTimeField(db_default=Now())

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["id", "tenant"], name="notification_of_tenant"),
            models.UniqueConstraint(
                fields=["tenant", "deduplication_key"], name="notification_once", nulls_distinct=False
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant", "-id"], name="notification_tenant"),
            models.Index(fields=["created_at"], name="notification_created"),
        ]

    def __str__(self) -> str:
        return self.text


class NotificationRead(models.Model):
    """The mark that a user or an API key has read a notification."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, null=True)
    notification = models.ForeignKey(Notification, on_delete=models.CASCADE, related_name="+")
    reader = models.CharField(max_length=40, help_text="`user:<id>` or `key:<id>`")
    read_at = models.DateTimeField(db_default=Now())

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["notification", "reader"], name="notification_read_once")
        ]

    def __str__(self) -> str:
        return f"{self.notification_id} by {self.reader}"


class NotificationChannel(models.Model):
    """A user's channels for a kind of notifications in a tenant, or of those for operators.

    Without a row, the defaults of the kind apply.
    """

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, null=True, help_text="null: of an operator")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=32)
    in_console = models.BooleanField()
    by_email = models.BooleanField()

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["tenant", "user", "kind"], name="notification_channel_once", nulls_distinct=False
            )
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant", "kind"], condition=Q(by_email=True), name="notification_by_email")
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.user_id}"
