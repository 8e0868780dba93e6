"""Alert channels: webhook endpoints of another kind, with an encrypted secret."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("tenants", "0008_tenant_answer_cache"),
    ]

    operations = [
        migrations.AddField(
            "WebhookEndpoint",
            "kind",
            models.CharField(
                max_length=9,
                choices=[("webhook", "Webhook"), ("slack", "Slack"), ("pagerduty", "PagerDuty")],
                default="webhook",
                db_default="webhook",
            ),
        ),
        migrations.AddField(
            "WebhookEndpoint",
            "ciphertext",
            models.BinaryField(null=True, help_text="of a channel: Slack's URL, or PagerDuty's routing key"),
        ),
        migrations.AddField(
            "WebhookEndpoint",
            "encryption_key_id",
            models.CharField(max_length=16, blank=True, default="", db_default=""),
        ),
    ]
