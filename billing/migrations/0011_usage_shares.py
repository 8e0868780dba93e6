"""Add the shares of projects and cost centers in the usage of invoices."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0010_reminder_days")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="invoice",
            name="usage_labels",
            field=models.JSONField(
                help_text="names of the projects and cost centers in the usage; null: the usage is not divided",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="invoiceline",
            name="shares",
            field=models.JSONField(
                help_text="[{project, cost_center, events, tokens, femto, cents}]; null: not divided", null=True
            ),
        ),
    ]
