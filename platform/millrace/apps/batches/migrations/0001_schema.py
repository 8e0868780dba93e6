"""Create the tables of files, batches and their lines.

Written by tools/reset_migrations.py.
"""

import django.db.models.deletion
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
                    name='File',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('name', models.CharField(max_length=64, unique=True)),
                        ('tenant_id', models.BigIntegerField()),
                        ('project_id', models.BigIntegerField()),
                        ('filename', models.CharField(max_length=255)),
                        ('purpose', models.CharField(choices=[('batch', 'Batch'), ('batch_output', 'Batch Output'), ('messages', 'Messages'), ('messages_output', 'Messages Output')], max_length=20)),
                        ('size', models.BigIntegerField()),
                        ('is_internal', models.BooleanField(db_default=False, default=False)),
                        ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                        ('expires_at', models.DateTimeField()),
                    ],
                    options={
                        'indexes': [models.Index(models.F('tenant_id'), models.F('project_id'), models.OrderBy(models.F('id'), descending=True), name='batches_file_project'), models.Index(fields=['expires_at'], name='batches_file_expiry')],
                    },
                ),
                migrations.CreateModel(
                    name='Batch',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('name', models.CharField(max_length=64, unique=True)),
                        ('tenant_id', models.BigIntegerField()),
                        ('project_id', models.BigIntegerField()),
                        ('key_id', models.BigIntegerField()),
                        ('dialect', models.CharField(choices=[('openai', 'OpenAI'), ('anthropic', 'Anthropic')], max_length=10)),
                        ('endpoint', models.CharField(max_length=64)),
                        ('is_internal', models.BooleanField(db_default=False, default=False)),
                        ('status', models.CharField(choices=[('validating', 'Validating'), ('failed', 'Failed'), ('in_progress', 'In Progress'), ('finalizing', 'Finalizing'), ('completed', 'Completed'), ('expired', 'Expired'), ('cancelling', 'Cancelling'), ('cancelled', 'Cancelled')], db_default='validating', max_length=12)),
                        ('metadata', models.JSONField(null=True)),
                        ('errors', models.JSONField(null=True)),
                        ('input_file', models.CharField(max_length=64)),
                        ('output_file', models.CharField(max_length=64, null=True)),
                        ('error_file', models.CharField(max_length=64, null=True)),
                        ('usage', models.JSONField(null=True)),
                        ('output_seconds', models.IntegerField(null=True)),
                        ('total', models.IntegerField(db_default=0)),
                        ('succeeded', models.IntegerField(db_default=0)),
                        ('errored', models.IntegerField(db_default=0)),
                        ('cancelled', models.IntegerField(db_default=0)),
                        ('expired', models.IntegerField(db_default=0)),
                        ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                        ('expires_at', models.DateTimeField()),
                        ('in_progress_at', models.DateTimeField(null=True)),
                        ('finalizing_at', models.DateTimeField(null=True)),
                        ('completed_at', models.DateTimeField(null=True)),
                        ('failed_at', models.DateTimeField(null=True)),
                        ('expired_at', models.DateTimeField(null=True)),
                        ('cancelling_at', models.DateTimeField(null=True)),
                        ('cancelled_at', models.DateTimeField(null=True)),
                    ],
                    options={
                        'indexes': [models.Index(models.F('tenant_id'), models.F('project_id'), models.OrderBy(models.F('id'), descending=True), name='batches_batch_project'), models.Index(condition=models.Q(('status__in', ['validating', 'in_progress', 'finalizing', 'cancelling'])), fields=['id'], name='batches_batch_live')],
                    },
                ),
                migrations.CreateModel(
                    name='Line',
                    fields=[
                        ('pk', models.CompositePrimaryKey('batch_id', 'number', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('batch', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='lines', to='batches.batch')),
                        ('number', models.IntegerField()),
                        ('tenant_id', models.BigIntegerField()),
                        ('custom_id', models.TextField()),
                        ('byte_offset', models.BigIntegerField()),
                        ('size', models.IntegerField()),
                        ('state', models.CharField(choices=[('pending', 'Pending'), ('running', 'Running'), ('answered', 'Answered')], db_default='pending', max_length=8)),
                        ('runner_id', models.CharField(max_length=64, null=True)),
                        ('lease_expires_at', models.DateTimeField(null=True)),
                        ('not_before', models.DateTimeField(null=True)),
                        ('lost_count', models.SmallIntegerField(db_default=0)),
                        ('request_id', models.CharField(max_length=64, null=True)),
                        ('status', models.SmallIntegerField(null=True)),
                        ('answer', models.BinaryField(null=True)),
                    ],
                    options={
                        'indexes': [models.Index(condition=models.Q(('state', 'pending')), fields=['batch', 'number'], name='batches_line_pending'), models.Index(condition=models.Q(('state', 'running')), fields=['batch', 'lease_expires_at'], name='batches_line_running')],
                        'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('answer__isnull', False), ('state', 'answered'), ('status__isnull', False)), models.Q(models.Q(('state', 'answered'), _negated=True), ('answer__isnull', True)), _connector='OR'), name='batches_line_answer')],
                    },
                ),
            ],
        ),
    ]
