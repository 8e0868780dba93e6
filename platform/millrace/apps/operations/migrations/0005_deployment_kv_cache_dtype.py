"""Store the dtype of the KV cache of a deployment. Processes of the previous release write none."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0004_deployment_speculation'),
    ]

    operations = [
        migrations.AddField('Deployment', 'kv_cache_dtype', models.CharField(db_default='auto', default='auto', help_text='of the stored keys and values', max_length=8)),
    ]
