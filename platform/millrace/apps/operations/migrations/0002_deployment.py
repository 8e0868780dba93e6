"""The catalog of deployments. Only operators see it."""

from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Deployment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=64, unique=True)),
                ('source', models.CharField(max_length=1024)),
                ('revision', models.CharField(blank=True, max_length=128)),
                ('dtype', models.CharField(default='auto', max_length=16)),
                ('quantization', models.CharField(default='none', max_length=16)),
                ('max_model_len', models.IntegerField(null=True)),
                ('kv_cache_memory', models.CharField(blank=True, help_text="bytes or a share; empty: the worker's", max_length=16)),
                ('block_size', models.IntegerField(null=True)),
                ('tool_parser', models.CharField(default='auto', max_length=32)),
                ('reasoning_parser', models.CharField(default='auto', max_length=32)),
                ('default_max_tokens', models.IntegerField(null=True)),
                ('pools', models.JSONField(help_text='worker pool -> number of replicas; 0: one on each worker')),
                ('idle_seconds', models.IntegerField(default=0, help_text='0: never unloaded')),
                ('state', models.CharField(choices=[('loaded', 'loaded'), ('drained', 'drained'), ('unloaded', 'unloaded')], max_length=16)),
                ('imported', models.JSONField(help_text='what MILLRACE_MODELS said when it was last imported', null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('updated_at', models.DateTimeField(auto_now=True)),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        rls.system_only('operations_deployment'),
        migrations.RunSQL(
            [f'REVOKE ALL ON operations_deployment FROM {APP}'],
            [f'GRANT SELECT, INSERT, UPDATE, DELETE ON operations_deployment TO {APP}'],
        ),
    ]
