"""The days of reminders of each billing entity, and a state of emails that were not sent."""

from __future__ import annotations

import django.contrib.postgres.fields
import django.core.validators
from django.db import migrations, models

import billing.models.parties


class Migration(migrations.Migration):
    dependencies = [("billing", "0009_period_usage")]

    operations = [
        migrations.AddField(
            model_name="billingentity",
            name="reminder_days",
            field=django.contrib.postgres.fields.ArrayField(
                base_field=models.PositiveSmallIntegerField(
                    validators=[
                        django.core.validators.MinValueValidator(1),
                        django.core.validators.MaxValueValidator(365),
                    ]
                ),
                blank=True,
                db_default=[1, 8, 15],
                default=billing.models.parties.default_reminder_days,
                help_text="days past due on which an invoice is reminded of; empty: never",
                size=10,
            ),
        ),
        migrations.AlterField(
            model_name="invoiceemail",
            name="state",
            field=models.CharField(
                choices=[("queued", "Queued"), ("sent", "Sent"), ("failed", "Failed"), ("dropped", "Dropped")],
                default="queued",
                max_length=9,
            ),
        ),
    ]
