"""Create notifications with their reads and channels, and emails of a kind of notifications or to operators."""

from __future__ import annotations

from typing import ClassVar

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models
from django.db.models.functions import Cast, Now

from tenants.isolation import rls
from tenants.isolation.db_roles import SYSTEM
from tenants.migration_operations import combine
from tenants.text_field import UserTextField

_CASCADE = django.db.models.deletion.CASCADE
_ID = models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")
_TRANSACTION = Cast(
    Cast(models.Func(function="pg_current_xact_id", output_field=models.TextField()), models.TextField()),
    models.BigIntegerField(),
)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("tenants", "0005_operator_until")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="outboxemail",
            name="except_user_id",
            field=models.BigIntegerField(help_text="the user who caused it, who does not receive it", null=True),
        ),
        migrations.AddField(
            model_name="outboxemail",
            name="notification_kind",
            field=models.CharField(blank=True, db_default="", default="", max_length=32),
        ),
        migrations.AlterField(
            model_name="outboxemail",
            name="tenant",
            field=models.ForeignKey(help_text="null: to operators", null=True, on_delete=_CASCADE, to="tenants.tenant"),
        ),
        migrations.RunSQL(
            migrations.RunSQL.noop,
            [
                f"SET LOCAL ROLE {SYSTEM}",
                "DELETE FROM tenants_outboxemail WHERE tenant_id IS NULL",
                "SET CONSTRAINTS ALL IMMEDIATE",  # a table with pending checks cannot be altered
                "RESET ROLE",
            ],
        ),
        migrations.CreateModel(
            name="Notification",
            fields=[
                ("id", _ID),
                ("kind", models.CharField(max_length=32)),
                ("deduplication_key", models.CharField(help_text="unique in the tenant", max_length=120)),
                ("text", UserTextField()),
                (
                    "link",
                    models.CharField(
                        help_text="path of the object's page, below the tenant's or the operators'", max_length=200
                    ),
                ),
                (
                    "actor_user_id",
                    models.BigIntegerField(help_text="the user who caused it, who does not see it", null=True),
                ),
                (
                    "xid",
                    models.BigIntegerField(
                        db_default=_TRANSACTION, help_text="number of the transaction that wrote it"
                    ),
                ),
                ("created_at", models.DateTimeField(db_default=Now())),
                (
                    "tenant",
                    models.ForeignKey(
                        help_text="null: for operators", null=True, on_delete=_CASCADE, to="tenants.tenant"
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("id", "tenant"), name="notification_of_tenant"),
                    models.UniqueConstraint(
                        fields=("tenant", "deduplication_key"), name="notification_once", nulls_distinct=False
                    ),
                ],
                "indexes": [
                    models.Index(fields=["tenant", "-id"], name="notification_tenant"),
                    models.Index(fields=["created_at"], name="notification_created"),
                ],
            },
        ),
        migrations.CreateModel(
            name="NotificationRead",
            fields=[
                ("id", _ID),
                ("reader", models.CharField(help_text="`user:<id>` or `key:<id>`", max_length=40)),
                ("read_at", models.DateTimeField(db_default=Now())),
                (
                    "notification",
                    models.ForeignKey(on_delete=_CASCADE, related_name="+", to="tenants.notification"),
                ),
                ("tenant", models.ForeignKey(null=True, on_delete=_CASCADE, to="tenants.tenant")),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("notification", "reader"), name="notification_read_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="NotificationChannel",
            fields=[
                ("id", _ID),
                ("kind", models.CharField(max_length=32)),
                ("in_console", models.BooleanField()),
                ("by_email", models.BooleanField()),
                (
                    "tenant",
                    models.ForeignKey(
                        help_text="null: of an operator", null=True, on_delete=_CASCADE, to="tenants.tenant"
                    ),
                ),
                ("user", models.ForeignKey(on_delete=_CASCADE, related_name="+", to=settings.AUTH_USER_MODEL)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "user", "kind"), name="notification_channel_once", nulls_distinct=False
                    )
                ],
                "indexes": [
                    models.Index(
                        condition=models.Q(("by_email", True)), fields=["tenant", "kind"], name="notification_by_email"
                    )
                ],
            },
        ),
        combine(
            rls.same_tenant("tenants_notificationread", "notification_id", "tenants_notification"),
            rls.operations("tenants_notification"),
            rls.operations("tenants_notificationread"),
            rls.operations("tenants_notificationchannel"),
        ),
    ]
