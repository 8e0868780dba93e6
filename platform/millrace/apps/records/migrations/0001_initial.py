"""Records of requests and their contents, each seen by its own tenant alone."""

import django.contrib.postgres.indexes
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('tenants', '0005_keep_content'),
    ]

    operations = [
        migrations.CreateModel(
            name='RequestContent',
            fields=[
                ('pk', models.CompositePrimaryKey('tenant_id', 'request_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('tenant_id', models.BigIntegerField()),
                ('request_id', models.CharField(max_length=64)),
                ('at', models.DateTimeField()),
                ('body', models.TextField(help_text='the request, JSON as it was sent')),
                ('answers', models.JSONField(default=list, help_text='the texts generated')),
                ('truncated', models.BooleanField(help_text='body or answers were longer than what is kept')),
            ],
            options={
                'indexes': [models.Index(fields=['tenant_id', 'at'], name='records_content_at')],
            },
        ),
        migrations.CreateModel(
            name='RequestRecord',
            fields=[
                ('pk', models.CompositePrimaryKey('tenant_id', 'at', 'request_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('tenant_id', models.BigIntegerField()),
                ('at', models.DateTimeField(help_text='when its key was known')),
                ('request_id', models.CharField(max_length=64)),
                ('project_id', models.BigIntegerField()),
                ('key_id', models.BigIntegerField()),
                ('gateway_id', models.CharField(max_length=32)),
                ('endpoint', models.CharField(max_length=32)),
                ('asked', models.CharField(help_text="the model's name as it was asked for", max_length=128)),
                ('served', models.CharField(help_text='the model that answered, or was tried last; empty: none', max_length=128)),
                ('stream', models.BooleanField()),
                ('status', models.CharField(help_text="HTTP's, stream_<code>, or nothing", max_length=64)),
                ('code', models.CharField(help_text='of the error; empty: none', max_length=64)),
                ('verdict', models.CharField(choices=[('completed', 'Completed'), ('cancelled', 'Cancelled'), ('failed', 'Failed'), ('limited', 'Limited'), ('refused', 'Refused')], max_length=10)),
                ('bound', models.JSONField(help_text='the limit or budget that did not allow it', null=True)),
                ('limits', models.JSONField(default=list, help_text='the limits checked, and what they left')),
                ('windows', models.JSONField(default=list, help_text='of the budgets it was held from')),
                ('route', models.JSONField(default=dict)),
                ('placements', models.JSONField(default=list)),
                ('prompts', models.SmallIntegerField(default=1)),
                ('prompt_tokens', models.IntegerField(null=True)),
                ('max_tokens', models.IntegerField(help_text='that the answer was allowed', null=True)),
                ('hold_nano', models.BigIntegerField(null=True)),
                ('price_version', models.BigIntegerField(null=True)),
                ('total_ms', models.IntegerField()),
                ('ttft_ms', models.IntegerField(help_text='from its arrival to its first token', null=True)),
                ('dry_refused', models.SmallIntegerField(default=0, help_text='limits on trial that would have refused it')),
                ('replay_of', models.CharField(default='', help_text='the request whose answer it was given', max_length=64)),
                ('batch_id', models.BigIntegerField(null=True)),
                ('batch_line', models.IntegerField(null=True)),
            ],
            options={
                'indexes': [models.Index(models.F('request_id'), name='records_request'), models.Index(models.F('tenant_id'), models.OrderBy(models.F('at'), descending=True), condition=models.Q(('verdict', 'completed'), _negated=True), name='records_request_not_completed'), models.Index(condition=models.Q(('replay_of', ''), _negated=True), fields=['tenant_id', 'replay_of'], name='records_request_replay'), django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=['at'], name='records_request_at')],
                'constraints': [models.CheckConstraint(condition=models.Q(('verdict__in', ['completed', 'cancelled', 'failed', 'limited', 'refused'])), name='records_request_verdict')],
            },
        ),
        rls.operations('records_requestrecord'),
        rls.operations('records_requestcontent'),
    ]
