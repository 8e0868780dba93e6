"""Digests of stored prompts, which web jobs compute for cache warming."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("request_log", "0011_statistics_indexes"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestcontent",
            name="digests",
            field=models.JSONField(
                help_text="for cache warming; null: not computed, empty: the prompt cannot be warmed", null=True
            ),
        ),
    ]
