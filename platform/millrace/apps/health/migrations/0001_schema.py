"""Create the tables of deployments, cordons, machine costs, samples of replicas and health events.

Written by tools/reset_migrations.py.
"""

import django.contrib.postgres.fields
import django.contrib.postgres.indexes
import django.db.models.deletion
import tenants.migration_operations
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('tenants', '0001_schema'),
    ]

    operations = [
        tenants.migration_operations.CreateModels(
            operations=[
                migrations.CreateModel(
                    name='Deployment',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('name', models.CharField(max_length=64, unique=True)),
                        ('source', models.CharField(max_length=1024)),
                        ('revision', models.CharField(blank=True, max_length=128)),
                        ('dtype', models.CharField(default='auto', max_length=16)),
                        ('quantization', models.CharField(default='none', max_length=16)),
                        ('kv_cache_dtype', models.CharField(db_default='auto', default='auto', help_text='of the stored keys and values', max_length=8)),
                        ('max_model_len', models.IntegerField(null=True)),
                        ('kv_cache_memory', models.CharField(blank=True, help_text="bytes or a share; empty: the worker's", max_length=16)),
                        ('block_size', models.IntegerField(null=True)),
                        ('speculation', models.CharField(blank=True, db_default='', default='', help_text="auto or off; empty: the worker's", max_length=8)),
                        ('draft_model', models.CharField(blank=True, db_default='', default='', help_text='source, or self:quantization; empty: none', max_length=1024)),
                        ('tool_parser', models.CharField(default='auto', max_length=32)),
                        ('reasoning_parser', models.CharField(default='auto', max_length=32)),
                        ('default_max_tokens', models.IntegerField(null=True)),
                        ('pools', models.JSONField(help_text='worker pool -> number of replicas; 0: one on each worker')),
                        ('idle_seconds', models.IntegerField(default=0, help_text='0: never unloaded')),
                        ('state', models.CharField(choices=[('loaded', 'loaded'), ('drained', 'drained'), ('unloaded', 'unloaded')], max_length=16)),
                        ('engine', models.CharField(db_default='millrace', default='millrace', help_text='millrace, or the engine of an upstream', max_length=16)),
                        ('upstream_model', models.CharField(blank=True, db_default='', default='', help_text="the model's name at the upstream", max_length=256)),
                        ('preset', models.CharField(blank=True, db_default='', default='', max_length=32)),
                        ('credential', models.ForeignKey(null=True, on_delete=django.db.models.deletion.DO_NOTHING, to='tenants.upstreamcredential')),
                        ('allow_internal', models.BooleanField(db_default=False, default=False)),
                        ('concurrency', models.IntegerField(db_default=256, default=256, help_text='concurrent requests of a replica')),
                        ('command', models.TextField(blank=True, db_default='', default='', help_text='of a managed engine')),
                        ('images', models.BooleanField(db_default=False, default=False, help_text="whether the upstream's model reads images")),
                        ('tools', models.BooleanField(db_default=True, default=True, help_text="whether the upstream's model calls tools")),
                        ('reasoning', models.BooleanField(db_default=False, default=False, help_text="whether the upstream's model reasons")),
                        ('task', models.CharField(db_default='generate', default='generate', help_text="of an upstream's model", max_length=16)),
                        ('dimensions', models.IntegerField(help_text='numbers of a vector, if the task is embed', null=True)),
                        ('imported', models.JSONField(help_text='what MILLRACE_MODELS said when it was last imported', null=True)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('updated_at', models.DateTimeField(auto_now=True)),
                    ],
                    options={
                        'ordering': ['name'],
                    },
                ),
                migrations.CreateModel(
                    name='RemovedDeployment',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('name', models.CharField(max_length=64, unique=True)),
                        ('imported', models.JSONField(help_text='what MILLRACE_MODELS said when it was last imported')),
                    ],
                ),
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
            ],
        ),
    ]
