"""A small index by which an invoice finds the months that hold its events."""

import django.contrib.postgres.indexes
from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0008_budgets'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='usageevent',
            index=django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=['invoice_period'], name='billing_usage_period'),
        ),
    ]
