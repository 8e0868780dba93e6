"""Cordons, machine costs, samples of replicas, and health events. Only operators see them."""

import django.contrib.postgres.fields
import django.contrib.postgres.indexes
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('tenants', '0002_row_level_security'),
    ]

    operations = [
        migrations.CreateModel(
            name='Cordon',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('worker', models.CharField(max_length=128, unique=True)),
                ('drain', models.BooleanField(default=False)),
                ('reason', models.CharField(blank=True, max_length=200)),
                ('cordoned_by', models.CharField(max_length=254)),
                ('cordoned_at', models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name='MachineCost',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('model', models.CharField(max_length=128, unique=True)),
                ('nano_per_hour', models.BigIntegerField(help_text='nano-USD per hour and replica')),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('nano_per_hour__range', (0, 1000000000000000))), name='machine_cost_range')],
            },
        ),
        migrations.CreateModel(
            name='ReplicaSample',
            fields=[
                ('pk', models.CompositePrimaryKey('sampled_at', 'replica_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('sampled_at', models.DateTimeField(help_text='the minute')),
                ('replica_id', models.CharField(max_length=128)),
                ('worker', models.CharField(max_length=128)),
                ('model', models.CharField(max_length=128)),
                ('heartbeat_at', models.BigIntegerField(help_text='the value of the heartbeat that was read')),
                ('running', models.IntegerField()),
                ('waiting', models.IntegerField()),
                ('max_num_seqs', models.IntegerField()),
                ('kv_blocks', models.IntegerField()),
                ('kv_blocks_used', models.IntegerField()),
                ('cores', models.IntegerField()),
                ('cpu_ms', models.BigIntegerField()),
                ('forward_ms', models.BigIntegerField(help_text='time in forward passes')),
                ('steps', models.BigIntegerField()),
                ('batched_sequences', models.BigIntegerField()),
                ('prompt_tokens', models.BigIntegerField()),
                ('generation_tokens', models.BigIntegerField()),
                ('cache_queries', models.BigIntegerField()),
                ('cache_hits', models.BigIntegerField()),
                ('preemptions', models.BigIntegerField()),
                ('mfu', models.IntegerField(help_text='hundredths of a percent of the peak; null: unknown peak', null=True)),
                ('ttft', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), help_text="the histogram's counts of times to the first token", size=None)),
            ],
            options={
                'indexes': [models.Index(fields=['worker', 'sampled_at'], name='replica_sample_worker'), django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=['sampled_at'], name='replica_sample_sampled')],
            },
        ),
        migrations.CreateModel(
            name='HealthEvent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('issue_type', models.CharField(max_length=20)),
                ('subject', models.CharField(help_text='the object with the issue', max_length=128)),
                ('urgent', models.BooleanField()),
                ('title', models.CharField(max_length=250)),
                ('tenant_id', models.BigIntegerField(null=True)),
                ('opened_at', models.DateTimeField()),
                ('closed_at', models.DateTimeField(null=True)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['closed_at'], name='health_event_closed')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('closed_at__isnull', True)), fields=('issue_type', 'subject'), name='health_event_open_once')],
            },
        ),
        *(rls.system_only(f'operations_{table}') for table in ('cordon', 'healthevent', 'machinecost', 'replicasample')),
        migrations.RunSQL(
            [f'REVOKE ALL ON operations_healthevent FROM {APP}'],
            [f'GRANT SELECT, INSERT, UPDATE, DELETE ON operations_healthevent TO {APP}'],
        ),
    ]

