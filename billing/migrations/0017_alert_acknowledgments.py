"""Acknowledged and muted budget alerts."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("billing", "0016_draft_tokens"),
    ]

    operations = [
        migrations.AddField(
            "Budget",
            "alerts_muted_until",
            models.DateTimeField(null=True, help_text="until then, alerts are recorded and not sent"),
        ),
        migrations.AddField(
            "BudgetAlert",
            "is_muted",
            models.BooleanField(default=False, db_default=False, help_text="not sent, because alerts were muted"),
        ),
        migrations.AddField("BudgetAlert", "acknowledged_at", models.DateTimeField(null=True)),
        migrations.AddField(
            "BudgetAlert",
            "acknowledged_by",
            models.CharField(max_length=254, blank=True, default="", db_default=""),
        ),
    ]
