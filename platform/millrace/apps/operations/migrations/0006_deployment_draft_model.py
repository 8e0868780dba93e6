"""Store the draft model of a deployment's replicas. Processes of the previous release write none."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0005_deployment_kv_cache_dtype'),
    ]

    operations = [
        migrations.AddField('Deployment', 'draft_model', models.CharField(blank=True, db_default='', default='', help_text='source, or self:quantization; empty: none', max_length=1024)),
    ]
