"""Files and batches of cache warming are internal. `request_log` marks those that exist."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("batches", "0002_batch_usage"),
    ]

    operations = [
        migrations.AddField("file", "is_internal", models.BooleanField(db_default=False, default=False)),
        migrations.AddField("batch", "is_internal", models.BooleanField(db_default=False, default=False)),
    ]
