"""Create the tables of alert rules and their alerts.

Written by tools/reset_migrations.py.
"""

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
                    name='AlertRule',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('metric', models.CharField(choices=[('error_rate', 'Error Rate'), ('ttft_p95', 'Ttft P95'), ('key_expiry', 'Key Expiry'), ('credit', 'Credit'), ('replica_down', 'Replica Down'), ('deployment_down', 'Deployment Down'), ('upstream_down', 'Upstream Down')], max_length=16)),
                        ('threshold', models.BigIntegerField(help_text='hundredths of a percent, milliseconds, days, nano-units of the currency, or minutes')),
                        ('window_minutes', models.SmallIntegerField(help_text='of requests; null for other metrics', null=True)),
                        ('min_requests', models.IntegerField(help_text='fewer requests in the window trigger no alert', null=True)),
                        ('project', models.ForeignKey(help_text='null: all projects', null=True, on_delete=django.db.models.deletion.CASCADE, to='tenants.project')),
                        ('model', models.CharField(blank=True, default='', help_text='requested or served; empty: all', max_length=128)),
                        ('muted_until', models.DateTimeField(help_text='until then, alerts are recorded and not sent', null=True)),
                        ('active', models.BooleanField(default=True)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant', '-id'], name='alert_rule_tenant')],
                        'constraints': [models.CheckConstraint(condition=models.Q(('threshold__gte', 0)), name='alert_rule_threshold'), models.CheckConstraint(condition=models.Q(models.Q(('min_requests__isnull', True), ('window_minutes__isnull', True)), models.Q(('min_requests__gt', 0), ('window_minutes__gt', 0)), _connector='OR'), name='alert_rule_window')],
                    },
                ),
                migrations.CreateModel(
                    name='RuleAlert',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('rule', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='alerts.alertrule')),
                        ('subject', models.CharField(blank=True, default='', help_text='ID of the key or health event', max_length=128)),
                        ('summary', models.CharField(max_length=300)),
                        ('value', models.BigIntegerField(help_text='in the unit of the threshold', null=True)),
                        ('threshold', models.BigIntegerField()),
                        ('samples', models.IntegerField(help_text='requests in the window', null=True)),
                        ('event', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to='tenants.webhookevent')),
                        ('email', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to='tenants.outboxemail')),
                        ('is_muted', models.BooleanField(default=False, help_text='not sent, because the rule was muted')),
                        ('acknowledged_at', models.DateTimeField(null=True)),
                        ('acknowledged_by', models.CharField(blank=True, default='', max_length=254)),
                        ('created_at', models.DateTimeField(help_text='when it was triggered')),
                        ('last_seen_at', models.DateTimeField(help_text='when the condition was last true')),
                        ('resolved_at', models.DateTimeField(null=True)),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant', '-id'], name='rule_alert_tenant'), models.Index(fields=['rule', 'subject'], name='rule_alert_subject'), models.Index(fields=['resolved_at'], name='rule_alert_resolved')],
                        'constraints': [models.UniqueConstraint(condition=models.Q(('resolved_at__isnull', True)), fields=('rule', 'subject'), name='rule_alert_open_once')],
                    },
                ),
            ],
        ),
    ]
