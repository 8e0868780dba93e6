"""Cordons, what machines cost, how replicas were, and health events: of the platform, seen by operators alone."""

import django.contrib.postgres.fields
import django.contrib.postgres.indexes
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP

TABLES = ('cordon', 'healthevent', 'machinecost', 'replicaminute')


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('tenants', '0003_row_level_security'),
    ]

    operations = [
        migrations.CreateModel(
            name='Cordon',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('worker', models.CharField(max_length=128, unique=True)),
                ('drain', models.BooleanField(default=False)),
                ('why', models.CharField(blank=True, max_length=200)),
                ('by', models.CharField(max_length=254)),
                ('since', models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name='HealthEvent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(max_length=20)),
                ('subject', models.CharField(help_text='which of its kind', max_length=128)),
                ('urgent', models.BooleanField()),
                ('title', models.CharField(max_length=250)),
                ('tenant_id', models.BigIntegerField(null=True)),
                ('opened_at', models.DateTimeField()),
                ('closed_at', models.DateTimeField(null=True)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['closed_at'], name='health_event_closed')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('closed_at__isnull', True)), fields=('kind', 'subject'), name='health_event_open_once')],
            },
        ),
        migrations.CreateModel(
            name='MachineCost',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('model', models.CharField(max_length=128, unique=True)),
                ('nano_per_hour', models.BigIntegerField(help_text='nano-USD an hour for each replica')),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('nano_per_hour__range', (0, 1000000000000000))), name='machine_cost_whole')],
            },
        ),
        migrations.CreateModel(
            name='ReplicaMinute',
            fields=[
                ('pk', models.CompositePrimaryKey('at', 'replica_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('at', models.DateTimeField(help_text='the minute')),
                ('replica_id', models.CharField(max_length=128)),
                ('worker', models.CharField(max_length=128)),
                ('model', models.CharField(max_length=128)),
                ('beat', models.BigIntegerField(help_text='the heartbeat that told it')),
                ('running', models.IntegerField()),
                ('waiting', models.IntegerField()),
                ('max_batch', models.IntegerField()),
                ('kv_blocks', models.IntegerField()),
                ('kv_blocks_used', models.IntegerField()),
                ('cores', models.IntegerField()),
                ('cpu_ms', models.BigIntegerField()),
                ('forward_ms', models.BigIntegerField(help_text='spent in forward passes')),
                ('steps', models.BigIntegerField()),
                ('batched_sequences', models.BigIntegerField()),
                ('prompt_tokens', models.BigIntegerField()),
                ('generation_tokens', models.BigIntegerField()),
                ('cache_queries', models.BigIntegerField()),
                ('cache_hits', models.BigIntegerField()),
                ('preemptions', models.BigIntegerField()),
                ('mfu', models.IntegerField(help_text='hundredths of a percent of the peak; null: the peak is not known', null=True)),
                ('ttft', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), help_text='requests by time to their first token, as in the histogram', size=None)),
            ],
            options={
                'indexes': [models.Index(fields=['worker', 'at'], name='replica_minute_worker'), django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=['at'], name='replica_minute_at')],
            },
        ),
        *(rls.system_only(f'operations_{table}') for table in TABLES),
        migrations.RunSQL([f"REVOKE ALL ON operations_healthevent FROM {APP}"],
                          [f"GRANT SELECT, INSERT, UPDATE, DELETE ON operations_healthevent TO {APP}"]),
    ]
