"""Create the tables of requests, their contents, sums and comparisons, and the semantic cache.

Written by tools/reset_migrations.py.
"""

import django.contrib.postgres.indexes
import django.db.models.functions.comparison
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
                        ('ignored', models.JSONField(db_default=models.Value([], models.JSONField()), default=list, help_text='request fields that were accepted without effect')),
                        ('cache_layer', models.CharField(db_default='', default='', help_text='origin of the answer; empty: no usage is known', max_length=16)),
                        ('cache_source', models.CharField(db_default='', default='', help_text='the request whose cached or concurrent answer was returned', max_length=64)),
                        ('batch_id', models.BigIntegerField(null=True)),
                        ('batch_line', models.IntegerField(null=True)),
                        ('end_user', models.CharField(db_default='', default='', help_text='`user` of the request', max_length=128)),
                        ('failure', models.CharField(db_default='', default='', help_text='of the answer: schema or tool', max_length=8)),
                        ('retry_key', models.BigIntegerField(help_text='equal if the same end user sends the same prompt again', null=True)),
                        ('itl_us', models.IntegerField(help_text='mean time between tokens, in microseconds', null=True)),
                        ('experiment_id', models.BigIntegerField(null=True)),
                        ('experiment_arm', models.SmallIntegerField(help_text='number of the assigned arm', null=True)),
                        ('experiment_unit', models.CharField(db_default='', default='', help_text='hash of the assigned unit', max_length=32)),
                    ],
                    options={
                        'indexes': [models.Index(models.F('request_id'), name='request_log_request'), models.Index(models.F('tenant_id'), django.db.models.functions.comparison.Collate('request_id', 'C'), name='request_log_id_prefix'), models.Index(models.F('tenant_id'), models.OrderBy(models.F('started_at'), descending=True), condition=models.Q(('outcome', 'completed'), _negated=True), name='request_log_not_completed'), models.Index(condition=models.Q(('retry_key__isnull', False)), fields=['tenant_id', 'retry_key', 'started_at'], name='request_log_retry'), models.Index(condition=models.Q(('replay_of', ''), _negated=True), fields=['tenant_id', 'replay_of'], name='request_log_replay'), models.Index(fields=['tenant_id', 'started_at'], include=('outcome', 'ttft_ms'), name='request_log_outcome'), models.Index(condition=models.Q(('cache_layer__in', ('exact', 'semantic'))), fields=['tenant_id', 'started_at'], name='request_log_answer_hits'), django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=['started_at'], name='request_log_started')],
                        'constraints': [models.CheckConstraint(condition=models.Q(('outcome__in', ['completed', 'cancelled', 'failed', 'limited', 'refused'])), name='request_log_outcome_known')],
                    },
                ),
                migrations.CreateModel(
                    name='RequestRollup',
                    fields=[
                        ('pk', models.CompositePrimaryKey('tenant_id', 'day', 'project_id', 'served_model', 'policy', 'cache_layer', 'answer_miss', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('tenant_id', models.BigIntegerField()),
                        ('day', models.DateField()),
                        ('project_id', models.BigIntegerField()),
                        ('served_model', models.CharField(max_length=128)),
                        ('policy', models.TextField(help_text='name and version of the routing policy; empty: none')),
                        ('cache_layer', models.CharField(choices=[('exact', 'Exact'), ('single_flight', 'Single Flight'), ('semantic', 'Semantic'), ('prefix', 'Prefix'), ('host_memory', 'Host Memory'), ('computed', 'Computed')], max_length=16)),
                        ('answer_miss', models.TextField(help_text='why the answer cache did not serve the request; empty: no miss')),
                        ('requests', models.BigIntegerField(help_text='that were tried')),
                        ('succeeded', models.BigIntegerField()),
                        ('feedback', models.BigIntegerField()),
                        ('bad_feedback', models.BigIntegerField()),
                        ('schema_failures', models.BigIntegerField()),
                        ('tool_failures', models.BigIntegerField()),
                        ('retried', models.BigIntegerField()),
                        ('cancelled', models.BigIntegerField()),
                        ('errors', models.BigIntegerField()),
                        ('cost_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                        ('layer_requests', models.BigIntegerField(help_text='with a known cache layer; the following columns are theirs')),
                        ('input_tokens', models.BigIntegerField()),
                        ('read_tokens', models.BigIntegerField()),
                        ('output_tokens', models.BigIntegerField()),
                        ('hit_input', models.BigIntegerField()),
                        ('hit_output', models.BigIntegerField()),
                        ('saved_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                        ('host_tokens', models.BigIntegerField()),
                        ('misses', models.BigIntegerField(help_text='requests that the answer cache did not serve')),
                    ],
                ),
                migrations.CreateModel(
                    name='ChangedDay',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant_id', models.BigIntegerField()),
                        ('day', models.DateField()),
                        ('changed_at', models.DateTimeField(db_default=models.Func(function='clock_timestamp'))),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant_id', 'day'], name='request_log_changed_day')],
                    },
                ),
                migrations.CreateModel(
                    name='RequestRollupState',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('built_from', models.DateField()),
                        ('built_until', models.DateField()),
                    ],
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
                        ('digests', models.JSONField(help_text='for cache warming; null: not computed, empty: the prompt cannot be warmed', null=True)),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant_id', 'started_at'], name='request_log_content_started')],
                    },
                ),
                migrations.CreateModel(
                    name='ShadowComparison',
                    fields=[
                        ('pk', models.CompositePrimaryKey('tenant_id', 'started_at', 'request_id', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('tenant_id', models.BigIntegerField()),
                        ('started_at', models.DateTimeField(help_text='when the request was admitted')),
                        ('request_id', models.CharField(max_length=64)),
                        ('requested_model', models.CharField(max_length=128)),
                        ('policy_version', models.IntegerField()),
                        ('served_model', models.CharField(max_length=128)),
                        ('shadow_model', models.CharField(max_length=128)),
                        ('is_operator_paid', models.BooleanField()),
                        ('code', models.CharField(help_text='error code of a shadow without an answer; empty: it has answered', max_length=64)),
                        ('has_schema', models.BooleanField(help_text='whether the request asks for a structured output')),
                        ('failure', models.CharField(help_text='the first failed check; empty: all have passed', max_length=16)),
                        ('shadow_failure', models.CharField(max_length=16)),
                        ('output_tokens', models.IntegerField()),
                        ('shadow_output_tokens', models.IntegerField(null=True)),
                        ('cost_femto', models.DecimalField(decimal_places=0, help_text="by the tenant's prices", max_digits=38, null=True)),
                        ('shadow_cost_femto', models.DecimalField(decimal_places=0, max_digits=38, null=True)),
                        ('ttft_ms', models.IntegerField(null=True)),
                        ('shadow_ttft_ms', models.IntegerField(null=True)),
                        ('total_ms', models.IntegerField(null=True)),
                        ('shadow_total_ms', models.IntegerField(null=True)),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant_id', 'requested_model', 'started_at'], name='request_log_shadow_name'), django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=['started_at'], name='request_log_shadow_started')],
                    },
                ),
                migrations.CreateModel(
                    name='SemanticEntry',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant_id', models.BigIntegerField()),
                        ('scope', models.BinaryField(help_text='keyed digest of everything that must be equal: all but the last turn')),
                        ('question_digest', models.BinaryField(help_text='keyed digest of the question')),
                        ('vector', models.BinaryField(help_text='of the question, float16')),
                        ('answer_digest', models.BinaryField(help_text='keyed digest of the normalized answer')),
                        ('answer_vector', models.BinaryField(help_text='of the answer, float16; empty: the answer is too long')),
                        ('answer_group', models.BigIntegerField(help_text='equal for entries with the same answer')),
                        ('wrong', models.IntegerField(db_default=0, default=0, help_text='hits whose answer was wrong')),
                        ('request_id', models.CharField(max_length=64)),
                        ('question', models.BinaryField()),
                        ('answer', models.BinaryField()),
                        ('created_at', models.DateTimeField()),
                        ('expires_at', models.DateTimeField()),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant_id', 'id'], name='request_log_semantic_tenant'), models.Index(fields=['expires_at'], name='request_log_semantic_expires')],
                        'constraints': [models.UniqueConstraint(fields=('tenant_id', 'scope', 'question_digest'), name='request_log_semantic_question')],
                    },
                ),
                migrations.CreateModel(
                    name='SemanticEvidence',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant_id', models.BigIntegerField()),
                        ('embedding', models.CharField(help_text='the embedding deployment, with its version', max_length=200)),
                        ('band', models.SmallIntegerField()),
                        ('correct', models.IntegerField(db_default=0, default=0)),
                        ('wrong', models.IntegerField(db_default=0, default=0)),
                        ('updated_at', models.DateTimeField()),
                    ],
                    options={
                        'constraints': [models.UniqueConstraint(fields=('tenant_id', 'embedding', 'band'), name='request_log_semantic_band')],
                    },
                ),
                migrations.CreateModel(
                    name='WarmedPrompt',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant_id', models.BigIntegerField()),
                        ('cache', models.CharField(choices=[('answer', 'Answer'), ('prefix', 'Prefix')], max_length=6)),
                        ('fingerprint', models.BinaryField(help_text='digest of the prompt and its parameters, or of the shared prefix')),
                        ('key_id', models.BigIntegerField(help_text='the API key that it ran with')),
                        ('model', models.CharField(help_text='the model that served the original request', max_length=128)),
                        ('source_request_id', models.CharField(help_text='the stored request that the prompt is from', max_length=64)),
                        ('batch_id', models.BigIntegerField()),
                        ('batch_line', models.IntegerField()),
                        ('created_at', models.DateTimeField()),
                        ('expires_at', models.DateTimeField(help_text='until when a request can use it')),
                        ('expected_femto', models.BigIntegerField(help_text='expected saving less the expected cost')),
                        ('max_femto', models.BigIntegerField(help_text='maximum cost')),
                        ('prefix_tokens', models.IntegerField(default=0, help_text='estimated length of the shared prefix')),
                        ('request_id', models.CharField(default='', help_text='the request that computed it; empty: it has not ended, or did not run', max_length=64)),
                        ('cost_femto', models.BigIntegerField(help_text='empty: not settled', null=True)),
                        ('hits', models.IntegerField(default=0, help_text='requests that used it')),
                        ('saved_femto', models.BigIntegerField(default=0, help_text='what the first of these requests saved; the others would have been served without it')),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant_id', 'created_at'], name='request_log_warmed_created')],
                        'constraints': [models.UniqueConstraint(fields=('batch_id', 'batch_line'), name='request_log_warmed_line')],
                    },
                ),
            ],
        ),
    ]
