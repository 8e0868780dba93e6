"""Comparisons of requests with their shadows. A tenant sees only its own."""

import django.contrib.postgres.indexes
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ("request_log", "0008_warmedprompt"),
        ("tenants", "0002_row_level_security"),
    ]

    operations = [
        migrations.CreateModel(
            name="ShadowComparison",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "tenant_id",
                        "started_at",
                        "request_id",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("tenant_id", models.BigIntegerField()),
                ("started_at", models.DateTimeField(help_text="when the request was admitted")),
                ("request_id", models.CharField(max_length=64)),
                ("requested_model", models.CharField(max_length=128)),
                ("policy_version", models.IntegerField()),
                ("served_model", models.CharField(max_length=128)),
                ("shadow_model", models.CharField(max_length=128)),
                ("is_operator_paid", models.BooleanField()),
                (
                    "code",
                    models.CharField(
                        help_text="error code of a shadow without an answer; empty: it has answered", max_length=64
                    ),
                ),
                ("has_schema", models.BooleanField(help_text="whether the request asks for a structured output")),
                (
                    "failure",
                    models.CharField(help_text="the first failed check; empty: all have passed", max_length=16),
                ),
                ("shadow_failure", models.CharField(max_length=16)),
                ("output_tokens", models.IntegerField()),
                ("shadow_output_tokens", models.IntegerField(null=True)),
                (
                    "cost_femto",
                    models.DecimalField(
                        decimal_places=0, help_text="by the tenant's prices", max_digits=38, null=True
                    ),
                ),
                ("shadow_cost_femto", models.DecimalField(decimal_places=0, max_digits=38, null=True)),
                ("ttft_ms", models.IntegerField(null=True)),
                ("shadow_ttft_ms", models.IntegerField(null=True)),
                ("total_ms", models.IntegerField(null=True)),
                ("shadow_total_ms", models.IntegerField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant_id", "requested_model", "started_at"], name="request_log_shadow_name"
                    ),
                    django.contrib.postgres.indexes.BrinIndex(
                        autosummarize=True, fields=["started_at"], name="request_log_shadow_started"
                    ),
                ],
            },
        ),
        rls.operations("request_log_shadowcomparison"),
    ]
