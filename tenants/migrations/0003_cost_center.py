"""Add the cost center of API keys, by which invoices divide the usage."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

import tenants.one_line_text


class Migration(migrations.Migration):
    dependencies: ClassVar = [("tenants", "0002_sql")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="apikey",
            name="cost_center",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="by which invoices divide the usage; empty: none",
                max_length=60,
                validators=[tenants.one_line_text.check_line],
            ),
        ),
    ]
