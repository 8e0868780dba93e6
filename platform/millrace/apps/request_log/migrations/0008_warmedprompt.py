"""Prompts that were computed to fill a cache."""

from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ("request_log", "0007_semantic_cache"),
        ("tenants", "0002_row_level_security"),
    ]

    operations = [
        migrations.CreateModel(
            name="WarmedPrompt",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant_id", models.BigIntegerField()),
                ("cache", models.CharField(choices=[("answer", "Answer"), ("prefix", "Prefix")], max_length=6)),
                ("fingerprint", models.BinaryField(help_text="digest of the prompt and its parameters, or of the shared prefix")),
                ("key_id", models.BigIntegerField(help_text="the API key that it ran with")),
                ("model", models.CharField(help_text="the model that served the original request", max_length=128)),
                ("source_request_id", models.CharField(help_text="the stored request that the prompt is from", max_length=64)),
                ("batch_id", models.BigIntegerField()),
                ("batch_line", models.IntegerField()),
                ("created_at", models.DateTimeField()),
                ("expires_at", models.DateTimeField(help_text="until when a request can use it")),
                ("expected_femto", models.BigIntegerField(help_text="expected saving less the expected cost")),
                ("max_femto", models.BigIntegerField(help_text="maximum cost")),
                ("prefix_tokens", models.IntegerField(default=0, help_text="estimated length of the shared prefix")),
                ("request_id", models.CharField(default="", help_text="the request that computed it; empty: it has not ended, or did not run", max_length=64)),
                ("cost_femto", models.BigIntegerField(help_text="empty: not settled", null=True)),
                ("hits", models.IntegerField(default=0, help_text="requests that used it")),
                ("saved_femto", models.BigIntegerField(default=0, help_text="what the first of these requests saved; the others would have been served without it")),
            ],
            options={
                "indexes": [models.Index(fields=["tenant_id", "created_at"], name="request_log_warmed_created")],
                "constraints": [
                    models.UniqueConstraint(fields=("batch_id", "batch_line"), name="request_log_warmed_line")
                ],
            },
        ),
        rls.operations("request_log_warmedprompt"),
    ]
