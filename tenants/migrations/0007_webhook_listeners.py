"""Add listeners, a kind of webhook endpoints that fetch their events, with the state of deliveries that wait for them."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models
from django.db.models import Q

from tenants.isolation.db_roles import SYSTEM

_KINDS = [("webhook", "Webhook"), ("slack", "Slack"), ("pagerduty", "PagerDuty")]
_STATES = [("delivered", "Delivered"), ("failed", "Failed")]
_OF_LISTENERS = "SELECT id FROM tenants_webhookendpoint WHERE kind = 'listener'"
_REMOVE_LISTENERS = (
    "DELETE FROM tenants_webhookattempt WHERE delivery_id IN"
    f" (SELECT id FROM tenants_webhookdelivery WHERE endpoint_id IN ({_OF_LISTENERS}))",
    f"DELETE FROM tenants_webhookdelivery WHERE endpoint_id IN ({_OF_LISTENERS})",
    "DELETE FROM tenants_webhookendpoint WHERE kind = 'listener'",
)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("tenants", "0006_notifications")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="webhookendpoint",
            name="device",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="of a listener: the machine that it runs on",
                max_length=64,
            ),
        ),
        migrations.AddField(
            model_name="webhookendpoint",
            name="polled_at",
            field=models.DateTimeField(
                help_text="of a listener: when it last asked for events, to a minute", null=True
            ),
        ),
        migrations.AlterField(
            model_name="webhookendpoint",
            name="kind",
            field=models.CharField(
                choices=[*_KINDS, ("listener", "Listener")], db_default="webhook", default="webhook", max_length=9
            ),
        ),
        migrations.AlterField(
            model_name="webhookdelivery",
            name="state",
            field=models.CharField(
                choices=[("pending", "Pending"), ("waiting", "Waiting"), *_STATES], default="pending", max_length=9
            ),
        ),
        migrations.AddIndex(
            model_name="webhookdelivery",
            index=models.Index(fields=["endpoint", "id"], condition=Q(state="waiting"), name="webhook_delivery_waiting"),
        ),
        migrations.RunSQL(
            migrations.RunSQL.noop,
            [
                f"SET LOCAL ROLE {SYSTEM}",
                *_REMOVE_LISTENERS,
                "SET CONSTRAINTS ALL IMMEDIATE",  # a table with pending checks cannot be altered
                "RESET ROLE",
            ],
        ),
    ]
