"""Relief of the tax of written-off invoices, and the age of exchange rates of the tax currency."""

from __future__ import annotations

from typing import ClassVar

import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0004_cancellations")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="billingentity",
            name="max_rate_age_days",
            field=models.PositiveSmallIntegerField(
                default=7,
                db_default=7,
                validators=[django.core.validators.MinValueValidator(1)],
                help_text="days after which an exchange rate is too old for the tax currency",
            ),
        ),
        migrations.AddField(
            model_name="billingentity",
            name="relief_after_claim",
            field=models.BooleanField(
                default=False,
                db_default=False,
                help_text="owe the tax of a written-off invoice until the claim for its relief is recorded",
            ),
        ),
        migrations.AddField(
            model_name="invoice",
            name="tax_rate_on",
            field=models.DateField(null=True, help_text="day of tax_rate; None: issued by an earlier release"),
        ),
        migrations.AddField(
            model_name="invoice",
            name="display_rate_on",
            field=models.DateField(null=True, help_text="day of display_rate"),
        ),
    ]
