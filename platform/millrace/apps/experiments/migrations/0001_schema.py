"""Create the tables of the results of experiments.

Written by tools/reset_migrations.py.
"""

import django.db.models.functions.datetime
import tenants.migration_operations
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        tenants.migration_operations.CreateModels(
            operations=[
                migrations.CreateModel(
                    name='Observation',
                    fields=[
                        ('pk', models.CompositePrimaryKey('tenant_id', 'request_id', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('tenant_id', models.BigIntegerField()),
                        ('request_id', models.CharField(max_length=64)),
                        ('experiment_id', models.BigIntegerField()),
                        ('arm', models.SmallIntegerField()),
                        ('unit', models.CharField(max_length=32)),
                        ('started_at', models.DateTimeField()),
                        ('added_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                        ('due_at', models.DateTimeField(help_text='when it is counted, or counted again; null: counted', null=True)),
                        ('counted', models.JSONField(help_text='metric -> its count and sum; null: not counted yet', null=True)),
                    ],
                    options={
                        'indexes': [models.Index(condition=models.Q(('due_at__isnull', False)), fields=['experiment_id', 'due_at'], name='experiments_observation_due'), models.Index(fields=['added_at'], name='experiments_observation_added')],
                    },
                ),
                migrations.CreateModel(
                    name='UnitTotal',
                    fields=[
                        ('pk', models.CompositePrimaryKey('tenant_id', 'experiment_id', 'arm', 'unit', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('tenant_id', models.BigIntegerField()),
                        ('experiment_id', models.BigIntegerField()),
                        ('arm', models.SmallIntegerField()),
                        ('unit', models.CharField(max_length=32)),
                        ('totals', models.JSONField(default=dict, help_text='metric -> its count and sum')),
                    ],
                ),
                migrations.CreateModel(
                    name='ArmTotal',
                    fields=[
                        ('pk', models.CompositePrimaryKey('tenant_id', 'experiment_id', 'arm', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('tenant_id', models.BigIntegerField()),
                        ('experiment_id', models.BigIntegerField()),
                        ('arm', models.SmallIntegerField()),
                        ('requests', models.BigIntegerField(default=0)),
                        ('moments', models.JSONField(default=dict, help_text='metric -> the fields of `Moments`')),
                    ],
                ),
                migrations.CreateModel(
                    name='ExperimentPoint',
                    fields=[
                        ('pk', models.CompositePrimaryKey('tenant_id', 'experiment_id', 'hour', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('tenant_id', models.BigIntegerField()),
                        ('experiment_id', models.BigIntegerField()),
                        ('hour', models.DateTimeField()),
                        ('requests', models.BigIntegerField()),
                        ('sample_ratio_p', models.FloatField(help_text='the smallest one so far')),
                        ('changes', models.JSONField(help_text='of each treatment: metric -> estimate, low, high; or null')),
                    ],
                ),
            ],
        ),
    ]
