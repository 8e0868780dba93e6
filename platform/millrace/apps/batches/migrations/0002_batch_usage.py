"""Store the token usage of finished batches. Batches that finished before have none."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('batches', '0001_initial'),
    ]

    operations = [
        migrations.AddField('Batch', 'usage', models.JSONField(null=True)),
    ]
