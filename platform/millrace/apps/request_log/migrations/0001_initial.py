"""Records of requests and their contents. A tenant sees only its own rows."""

import django.contrib.postgres.indexes
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('tenants', '0002_row_level_security'),
    ]

    operations = [
        migrations.CreateModel(
            name='RequestRecord',
            fields=[
                ('pk', models.CompositePrimaryKey('tenant_id', 'started_at', 'request_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('tenant_id', models.BigIntegerField()),
                ('started_at', models.DateTimeField(help_text='when the key was authenticated')),
                ('request_id', models.CharField(max_length=64)),
                ('project_id', models.BigIntegerField()),
                ('key_id', models.BigIntegerField()),
                ('gateway_id', models.CharField(max_length=32)),
                ('endpoint', models.CharField(max_length=32)),
                ('requested_model', models.CharField(help_text='the model name in the request', max_length=128)),
                ('served_model', models.CharField(help_text='the model that answered, or the last attempted one', max_length=128)),
                ('stream', models.BooleanField()),
                ('status', models.CharField(help_text='HTTP status, stream_<code>, or nothing', max_length=64)),
                ('code', models.CharField(help_text='error code; empty: no error', max_length=64)),
                ('outcome', models.CharField(choices=[('completed', 'Completed'), ('cancelled', 'Cancelled'), ('failed', 'Failed'), ('limited', 'Limited'), ('refused', 'Refused')], max_length=10)),
                ('limited_by', models.JSONField(help_text='the limit or budget that rejected the request', null=True)),
                ('limits', models.JSONField(default=list, help_text='the checked limits, and what was left of each')),
                ('budget_periods', models.JSONField(default=list, help_text='IDs of the budget periods with a reservation')),
                ('route', models.JSONField(default=dict)),
                ('placements', models.JSONField(default=list)),
                ('prompts', models.SmallIntegerField(default=1)),
                ('prompt_tokens', models.IntegerField(null=True)),
                ('max_tokens', models.IntegerField(help_text='maximum tokens of the completion', null=True)),
                ('reserved_nano', models.BigIntegerField(null=True)),
                ('price_version', models.BigIntegerField(null=True)),
                ('total_ms', models.IntegerField()),
                ('ttft_ms', models.IntegerField(help_text="from the request's arrival to its first token", null=True)),
                ('dry_run_rejections', models.SmallIntegerField(default=0, help_text='number of dry-run limits that would have rejected the request')),
                ('replay_of', models.CharField(default='', help_text='the request whose response was returned again', max_length=64)),
                ('batch_id', models.BigIntegerField(null=True)),
                ('batch_line', models.IntegerField(null=True)),
            ],
            options={
                'indexes': [models.Index(models.F('request_id'), name='request_log_request'), models.Index(models.F('tenant_id'), models.OrderBy(models.F('started_at'), descending=True), condition=models.Q(('outcome', 'completed'), _negated=True), name='request_log_not_completed'), models.Index(condition=models.Q(('replay_of', ''), _negated=True), fields=['tenant_id', 'replay_of'], name='request_log_replay'), django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=['started_at'], name='request_log_started')],
                'constraints': [models.CheckConstraint(condition=models.Q(('outcome__in', ['completed', 'cancelled', 'failed', 'limited', 'refused'])), name='request_log_outcome_known')],
            },
        ),
        migrations.CreateModel(
            name='RequestContent',
            fields=[
                ('pk', models.CompositePrimaryKey('tenant_id', 'request_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('tenant_id', models.BigIntegerField()),
                ('request_id', models.CharField(max_length=64)),
                ('started_at', models.DateTimeField()),
                ('body', models.TextField(help_text="the request's JSON body")),
                ('answers', models.JSONField(default=list, help_text='the generated texts')),
                ('truncated', models.BooleanField(help_text='whether the body or the answers were cut')),
            ],
            options={
                'indexes': [models.Index(fields=['tenant_id', 'started_at'], name='request_log_content_started')],
            },
        ),
        rls.operations('request_log_requestrecord'),
        rls.operations('request_log_requestcontent'),
    ]

