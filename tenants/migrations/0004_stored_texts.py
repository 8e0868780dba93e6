"""Store errors of webhooks, emails and jobs as sentences with values."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from tenants.migration_operations import store_texts
from tenants.text_field import UserTextField

_SENTENCES = (
    "No delivery succeeded for %(days)s days. %(error)s",
    "The response status was %(status)s.",
    "The certificate is not valid: %(reason)s.",
    "The connection failed: %(reason)s.",
    "The mail server responded with %(code)s.",
    "The result is larger than %(max_result_bytes)s bytes. Choose a shorter period.",
)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("tenants", "0003_cost_center")]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="webhookendpoint",
            name="disabled_because",
            field=UserTextField(blank=True, help_text="why the platform disabled it"),
        ),
        migrations.AlterField(
            model_name="webhookattempt",
            name="error",
            field=UserTextField(blank=True),
        ),
        migrations.AlterField(
            model_name="outboxemail",
            name="error",
            field=UserTextField(blank=True, db_default="", default="", help_text="why the last attempt failed"),
        ),
        migrations.AlterField(
            model_name="tenantjob",
            name="error",
            field=UserTextField(blank=True, help_text="why it failed, for the user"),
        ),
        store_texts(
            {
                ("tenants_webhookendpoint", "disabled_because"): 200,
                ("tenants_webhookattempt", "error"): 200,
                ("tenants_outboxemail", "error"): 200,
                ("tenants_tenantjob", "error"): 1000000,
            },
            _SENTENCES,
        ),
    ]
