"""Experiments on model names. A tenant sees only its own."""

import django.db.models.deletion
import tenants.models.experiments
from django.conf import settings
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0009_alert_channels'),
    ]

    operations = [
        migrations.CreateModel(
            name='Experiment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=64)),
                ('model', models.CharField(help_text='the model name of the requests', max_length=64)),
                ('unit', models.CharField(choices=[('end_user', 'End user'), ('conversation', 'Conversation'), ('key', 'API key'), ('metadata', 'Metadata field')], default='end_user', max_length=12)),
                ('metadata_key', models.CharField(blank=True, default='', max_length=64)),
                ('arms', models.JSONField(help_text='the first one is the control')),
                ('primary_metric', models.CharField(max_length=16)),
                ('guardrails', models.JSONField(blank=True, default=dict, help_text='metric -> the largest change for the worse that is allowed')),
                ('planned_days', models.IntegerField(default=14)),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('running', 'Running'), ('stopped', 'Stopped')], default='draft', max_length=8)),
                ('seed', models.CharField(default=tenants.models.experiments.new_seed, max_length=32)),
                ('stop_reason', models.CharField(blank=True, choices=[('user', 'Stopped by a user'), ('harm', 'Stopped automatically: a guardrail was crossed'), ('ended', 'Planned end reached')], default='', max_length=8)),
                ('stop_metric', models.CharField(blank=True, default='', help_text='the guardrail that was crossed', max_length=16)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('started_at', models.DateTimeField(null=True)),
                ('stopped_at', models.DateTimeField(null=True)),
                ('created_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.UniqueConstraint(fields=('tenant', 'name'), name='experiment_name_unique'), models.UniqueConstraint(condition=models.Q(('state', 'running')), fields=('tenant', 'model'), name='experiment_one_running'), models.CheckConstraint(condition=models.Q(('planned_days__range', (1, 90))), name='experiment_days')],
            },
        ),
        rls.operations('tenants_experiment'),
    ]
