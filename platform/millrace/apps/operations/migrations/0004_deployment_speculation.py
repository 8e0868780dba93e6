"""Store whether the replicas of a deployment use speculative decoding. Processes of the previous release write none."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0003_deployment_upstreams'),
    ]

    operations = [
        migrations.AddField('Deployment', 'speculation', models.CharField(blank=True, db_default='', default='', help_text="auto or off; empty: the worker's", max_length=8)),
    ]
