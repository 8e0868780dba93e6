"""Stored sums of the usage of months that are not invoiced, for the gates of prepaid tenants."""

from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):
    dependencies = [
        ("billing", "0008_e_invoices"),
    ]

    operations = [
        migrations.CreateModel(
            name="PeriodUsage",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant_id", models.BigIntegerField()),
                ("period_id", models.BigIntegerField()),
                ("settled_before", models.DateTimeField()),
                (
                    "lines",
                    models.JSONField(
                        help_text="[{price_id, usage_month, billed_period, events, tokens, first_at, last_at}]"
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("tenant_id", "period_id"), name="period_usage_once")],
            },
        ),
        rls.operations("billing_periodusage"),
        rls.revoke("INSERT, UPDATE, DELETE", "billing_periodusage"),
    ]
