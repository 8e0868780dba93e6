"""Create the tables of tenants, users, keys, limits, policies, the audit log, the change feed, webhooks, emails and jobs.

Written by tools/reset_migrations.py.
"""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
import django.db.models.functions.text
import tenants.migration_operations
import tenants.models.experiments
import tenants.models.outbox
import tenants.models.records
import tenants.models.webhooks
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('auth', '0012_alter_user_first_name_max_length'),
    ]

    operations = [
        tenants.migration_operations.CreateModels(
            operations=[
                migrations.CreateModel(
                    name='Tenant',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('slug', models.SlugField(unique=True)),
                        ('name', models.CharField(max_length=200)),
                        ('status', models.CharField(choices=[('active', 'Active'), ('suspended', 'Suspended'), ('purged', 'Purged')], default='active', max_length=20)),
                        ('is_demo', models.BooleanField(default=False)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('purge_after', models.DateTimeField(blank=True, null=True)),
                        ('content_retention_days', models.SmallIntegerField(default=0, help_text='retention of prompts and completions; 0: not stored')),
                        ('unknown_parameters', models.CharField(choices=[('default', "platform's default"), ('reject', 'Reject'), ('warn', 'Warn')], db_default='default', default='default', help_text='whether unknown fields of requests are rejected, or dropped and named', max_length=10)),
                        ('allowed_origins', models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='origins of web pages that may call the API')),
                        ('answer_cache_seconds', models.IntegerField(db_default=0, default=0, help_text='lifetime of cached answers; 0: answers are not cached')),
                        ('answer_cache_sampled', models.BooleanField(db_default=False, default=False, help_text='whether answers with a temperature above 0 are cached too')),
                        ('answer_cache_scope', models.CharField(choices=[('tenant', 'all projects'), ('project', 'keys of the same project')], db_default='tenant', default='tenant', help_text='whether cached answers are shared by all projects, or only by the keys of a project', max_length=10)),
                        ('semantic_cache_max_error_percent', models.SmallIntegerField(db_default=0, default=0, help_text='maximum error rate of answers to similar questions; 0: none are served')),
                        ('cache_warming_nano', models.BigIntegerField(db_default=0, default=0, help_text='budget of cache warming for each day, in nano-USD; 0: caches are not warmed')),
                    ],
                    options={
                        'ordering': ['slug'],
                        'constraints': [models.CheckConstraint(condition=models.Q(('status__in', ['active', 'suspended', 'purged'])), name='tenant_status_known'), models.CheckConstraint(condition=models.Q(('content_retention_days__range', (0, 90))), name='tenant_content_retention_days'), models.CheckConstraint(condition=models.Q(('unknown_parameters__in', ['default', 'reject', 'warn'])), name='tenant_unknown_parameters'), models.CheckConstraint(condition=models.Q(('answer_cache_seconds__range', (0, 2592000))), name='tenant_answer_cache_seconds'), models.CheckConstraint(condition=models.Q(('answer_cache_scope__in', ['tenant', 'project'])), name='tenant_answer_cache_scope'), models.CheckConstraint(condition=models.Q(('semantic_cache_max_error_percent__range', (0, 20))), name='tenant_semantic_cache_max_error'), models.CheckConstraint(condition=models.Q(('cache_warming_nano__range', (0, 1000000000000000))), name='tenant_cache_warming_nano')],
                    },
                ),
                migrations.CreateModel(
                    name='Project',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
                        ('slug', models.SlugField()),
                        ('name', models.CharField(max_length=200)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                    ],
                    options={
                        'ordering': ['slug'],
                        'constraints': [models.UniqueConstraint(fields=('tenant', 'slug'), name='project_slug_unique'), models.UniqueConstraint(fields=('id', 'tenant'), name='project_of_tenant')],
                    },
                ),
                migrations.CreateModel(
                    name='UpstreamCredential',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('name', models.CharField(max_length=64)),
                        ('model_names', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=64), blank=True, default=list, help_text="only of a tenant's", size=None)),
                        ('ciphertext', models.BinaryField()),
                        ('encryption_key_id', models.CharField(help_text='of the key in MILLRACE_CREDENTIAL_KEYS', max_length=8)),
                        ('version', models.IntegerField(default=1, help_text='increases by 1 with each rotation of the secret')),
                        ('daily_spend_limit_nano', models.BigIntegerField(help_text='nano-USD per day (UTC); null: no limit', null=True)),
                        ('max_concurrency', models.IntegerField(help_text='concurrent requests of all replicas; null: no limit', null=True)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('rotated_at', models.DateTimeField(null=True)),
                    ],
                    options={
                        'ordering': ['-id'],
                        'constraints': [models.UniqueConstraint(fields=('tenant', 'name'), name='upstream_credential_name', nulls_distinct=False), models.CheckConstraint(condition=models.Q(models.Q(('daily_spend_limit_nano__isnull', True), ('daily_spend_limit_nano__gte', 0), _connector='OR'), models.Q(('max_concurrency__isnull', True), ('max_concurrency__gte', 1), _connector='OR')), name='upstream_credential_limits')],
                    },
                ),
                migrations.CreateModel(
                    name='User',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('password', models.CharField(max_length=128, verbose_name='password')),
                        ('last_login', models.DateTimeField(blank=True, null=True, verbose_name='last login')),
                        ('is_superuser', models.BooleanField(default=False, help_text='Designates that this user has all permissions without explicitly assigning them.', verbose_name='superuser status')),
                        ('email', models.EmailField(max_length=254, unique=True)),
                        ('name', models.CharField(blank=True, max_length=200)),
                        ('is_active', models.BooleanField(default=True)),
                        ('is_staff', models.BooleanField(default=False, verbose_name='operator')),
                        ('date_joined', models.DateTimeField(auto_now_add=True)),
                        ('session_generation', models.PositiveIntegerField(db_default=0, default=0)),
                        ('groups', models.ManyToManyField(blank=True, help_text='The groups this user belongs to. A user will get all permissions granted to each of their groups.', related_name='user_set', related_query_name='user', to='auth.group', verbose_name='groups')),
                        ('user_permissions', models.ManyToManyField(blank=True, help_text='Specific permissions for this user.', related_name='user_set', related_query_name='user', to='auth.permission', verbose_name='user permissions')),
                    ],
                ),
                migrations.CreateModel(
                    name='Membership',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='memberships', to=settings.AUTH_USER_MODEL)),
                        ('role', models.CharField(choices=[('owner', 'Owner'), ('admin', 'Admin'), ('developer', 'Developer'), ('billing', 'Billing'), ('readonly', 'Read Only')], max_length=20)),
                        ('alert_emails', models.BooleanField(db_default=True, default=True)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                    ],
                    options={
                        'constraints': [models.UniqueConstraint(fields=('tenant', 'user'), name='membership_unique'), models.CheckConstraint(condition=models.Q(('role__in', ['owner', 'admin', 'developer', 'billing', 'readonly'])), name='membership_role_known')],
                    },
                ),
                migrations.CreateModel(
                    name='Invitation',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('email', models.EmailField(max_length=254)),
                        ('role', models.CharField(choices=[('owner', 'Owner'), ('admin', 'Admin'), ('developer', 'Developer'), ('billing', 'Billing'), ('readonly', 'Read Only')], max_length=20)),
                        ('nonce', models.CharField(max_length=32)),
                        ('invited_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('expires_at', models.DateTimeField()),
                        ('accepted_at', models.DateTimeField(null=True)),
                        ('accepted_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                        ('revoked_at', models.DateTimeField(null=True)),
                    ],
                    options={
                        'ordering': ['-id'],
                        'constraints': [models.UniqueConstraint(models.F('tenant'), django.db.models.functions.text.Lower('email'), condition=models.Q(('accepted_at__isnull', True), ('revoked_at__isnull', True)), name='invitation_one_open'), models.CheckConstraint(condition=models.Q(('role__in', ['owner', 'admin', 'developer', 'billing', 'readonly'])), name='invitation_role_known')],
                    },
                ),
                migrations.CreateModel(
                    name='Experiment',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
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
                        ('created_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                        ('started_at', models.DateTimeField(null=True)),
                        ('stopped_at', models.DateTimeField(null=True)),
                    ],
                    options={
                        'ordering': ['-id'],
                        'constraints': [models.UniqueConstraint(fields=('tenant', 'name'), name='experiment_name_unique'), models.UniqueConstraint(condition=models.Q(('state', 'running')), fields=('tenant', 'model'), name='experiment_one_running'), models.CheckConstraint(condition=models.Q(('planned_days__range', (1, 90))), name='experiment_days')],
                    },
                ),
                migrations.CreateModel(
                    name='TenantJob',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('kind', models.CharField(help_text='what the job does, such as cache-warming.run', max_length=64)),
                        ('permission', models.CharField(help_text='needed to see the job', max_length=32)),
                        ('parameters', models.JSONField(default=dict)),
                        ('actor', models.JSONField(help_text='fields of the `tenants.audit.Actor` who started it')),
                        ('status', models.CharField(choices=[('queued', 'Queued'), ('running', 'Running'), ('completed', 'Completed'), ('failed', 'Failed')], default='queued', max_length=9)),
                        ('attempts', models.SmallIntegerField(default=0, help_text='runs, of which all but the last were interrupted')),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('started_at', models.DateTimeField(null=True)),
                        ('ended_at', models.DateTimeField(null=True)),
                        ('error', models.TextField(blank=True, help_text='why it failed, for the user')),
                        ('result', models.TextField(blank=True)),
                        ('content_type', models.CharField(blank=True, help_text='of the result', max_length=64)),
                        ('filename', models.CharField(blank=True, help_text='of a result that is a file', max_length=128)),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant', '-id'], name='tenant_job_newest'), models.Index(condition=models.Q(('status__in', ('queued', 'running'))), fields=['id'], name='tenant_job_open'), models.Index(fields=['created_at'], name='tenant_job_created')],
                    },
                ),
                migrations.CreateModel(
                    name='ApiKey',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
                        ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='keys', to='tenants.project')),
                        ('name', models.CharField(max_length=200)),
                        ('prefix', models.CharField(max_length=20)),
                        ('key_hash', models.BinaryField(max_length=32, unique=True)),
                        ('pepper', models.CharField(db_default='', default='', max_length=8)),
                        ('scopes', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=20), size=None)),
                        ('allowed_models', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=64), blank=True, null=True, size=None)),
                        ('allowed_ip_ranges', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=43), blank=True, null=True, size=None)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('created_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
                        ('expires_at', models.DateTimeField(blank=True, null=True)),
                        ('revoked_at', models.DateTimeField(blank=True, null=True)),
                        ('replaces', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='tenants.apikey')),
                    ],
                    options={
                        'ordering': ['-id'],
                        'constraints': [models.UniqueConstraint(fields=('id', 'tenant'), name='key_of_tenant')],
                    },
                ),
                migrations.CreateModel(
                    name='ApiKeySnapshotRow',
                    fields=[
                        ('key_hash', models.BinaryField(max_length=32, primary_key=True, serialize=False)),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('key', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='snapshot', to='tenants.apikey')),
                        ('version', models.BigIntegerField()),
                        ('payload', models.BinaryField()),
                    ],
                    options={
                        'db_table': 'tenants_apikeysnapshot',
                    },
                ),
                migrations.CreateModel(
                    name='ApiKeyUsage',
                    fields=[
                        ('key', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='usage', serialize=False, to='tenants.apikey')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('last_used_at', models.DateTimeField()),
                    ],
                ),
                migrations.CreateModel(
                    name='AuditEntry',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('tenant_id', models.BigIntegerField(null=True)),
                        ('action', models.CharField(max_length=64)),
                        ('actor_user_id', models.BigIntegerField(null=True)),
                        ('actor_key_id', models.BigIntegerField(null=True)),
                        ('actor', models.CharField(max_length=254)),
                        ('ip_address', models.GenericIPAddressField(null=True)),
                        ('request_id', models.CharField(blank=True, max_length=64)),
                        ('object_type', models.CharField(max_length=40)),
                        ('object_id', models.BigIntegerField(null=True)),
                        ('object_name', models.CharField(max_length=254)),
                        ('before', models.JSONField(null=True)),
                        ('after', models.JSONField(null=True)),
                    ],
                    options={
                        'ordering': ['-id'],
                        'indexes': [models.Index(fields=['tenant_id', '-id'], name='audit_tenant'), models.Index(fields=['tenant_id', 'object_type', 'object_id'], name='audit_object')],
                    },
                ),
                migrations.CreateModel(
                    name='ChangeEventRow',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('xid', tenants.models.records.Xid8Field(db_default=models.Func(function='pg_current_xact_id'))),
                        ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                        ('change_type', models.CharField(choices=[('credential', 'Credential'), ('key', 'Key'), ('limits', 'Limits'), ('member', 'Member'), ('policy', 'Policy'), ('tenant', 'Tenant')], max_length=10)),
                        ('tenant_id', models.BigIntegerField()),
                        ('key_id', models.BigIntegerField(null=True)),
                    ],
                    options={
                        'db_table': 'tenants_changeevent',
                        'indexes': [models.Index(fields=['xid'], name='change_event_xid'), models.Index(fields=['created_at'], name='change_event_created')],
                    },
                ),
                migrations.CreateModel(
                    name='IdempotentResponse',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant_id', models.BigIntegerField(null=True)),
                        ('caller', models.CharField(max_length=40)),
                        ('name', models.CharField(max_length=255)),
                        ('request_hash', models.BinaryField(max_length=32)),
                        ('status', models.SmallIntegerField(null=True)),
                        ('body', models.BinaryField(null=True)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                    ],
                    options={
                        'indexes': [models.Index(fields=['created_at'], name='idempotent_response_created')],
                        'constraints': [models.UniqueConstraint(fields=('caller', 'name'), name='idempotent_response_once')],
                    },
                ),
                migrations.CreateModel(
                    name='LimitSet',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('project', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='tenants.project')),
                        ('key', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='tenants.apikey')),
                        ('model', models.CharField(blank=True, default='', max_length=64)),
                        ('set_by_operator', models.BooleanField(default=False)),
                        ('dry_run', models.BooleanField(default=False)),
                        ('requests_per_minute', models.BigIntegerField(null=True)),
                        ('input_tokens_per_minute', models.BigIntegerField(null=True)),
                        ('output_tokens_per_minute', models.BigIntegerField(null=True)),
                        ('tokens_per_minute', models.BigIntegerField(null=True)),
                        ('requests_per_day', models.BigIntegerField(null=True)),
                        ('input_tokens_per_day', models.BigIntegerField(null=True)),
                        ('output_tokens_per_day', models.BigIntegerField(null=True)),
                        ('tokens_per_day', models.BigIntegerField(null=True)),
                        ('concurrency', models.BigIntegerField(help_text='concurrent requests', null=True)),
                        ('max_prompt_tokens', models.BigIntegerField(null=True)),
                        ('max_output_tokens', models.BigIntegerField(null=True)),
                        ('long_prompt_threshold', models.BigIntegerField(help_text='tokens from which a prompt is long', null=True)),
                        ('long_prompt_concurrency', models.BigIntegerField(help_text='concurrent requests with long prompts', null=True)),
                        ('updated_at', models.DateTimeField(auto_now=True)),
                    ],
                    options={
                        'ordering': ['-id'],
                        'constraints': [models.UniqueConstraint(fields=('tenant', 'project', 'key', 'model', 'set_by_operator', 'dry_run'), name='limits_unique_scope', nulls_distinct=False), models.CheckConstraint(condition=models.Q(('project__isnull', True), ('key__isnull', True), _connector='OR'), name='limits_one_scope'), models.CheckConstraint(condition=models.Q(('requests_per_minute__isnull', False), ('input_tokens_per_minute__isnull', False), ('output_tokens_per_minute__isnull', False), ('tokens_per_minute__isnull', False), ('requests_per_day__isnull', False), ('input_tokens_per_day__isnull', False), ('output_tokens_per_day__isnull', False), ('tokens_per_day__isnull', False), ('concurrency__isnull', False), ('max_prompt_tokens__isnull', False), ('max_output_tokens__isnull', False), ('long_prompt_threshold__isnull', False), ('long_prompt_concurrency__isnull', False), _connector='OR'), name='limits_not_empty'), models.CheckConstraint(condition=models.Q(models.Q(('requests_per_minute__isnull', True), ('requests_per_minute__gte', 0), _connector='OR'), models.Q(('input_tokens_per_minute__isnull', True), ('input_tokens_per_minute__gte', 0), _connector='OR'), models.Q(('output_tokens_per_minute__isnull', True), ('output_tokens_per_minute__gte', 0), _connector='OR'), models.Q(('tokens_per_minute__isnull', True), ('tokens_per_minute__gte', 0), _connector='OR'), models.Q(('requests_per_day__isnull', True), ('requests_per_day__gte', 0), _connector='OR'), models.Q(('input_tokens_per_day__isnull', True), ('input_tokens_per_day__gte', 0), _connector='OR'), models.Q(('output_tokens_per_day__isnull', True), ('output_tokens_per_day__gte', 0), _connector='OR'), models.Q(('tokens_per_day__isnull', True), ('tokens_per_day__gte', 0), _connector='OR'), models.Q(('concurrency__isnull', True), ('concurrency__gte', 0), _connector='OR'), models.Q(('max_prompt_tokens__isnull', True), ('max_prompt_tokens__gte', 0), _connector='OR'), models.Q(('max_output_tokens__isnull', True), ('max_output_tokens__gte', 0), _connector='OR'), models.Q(('long_prompt_threshold__isnull', True), ('long_prompt_threshold__gte', 0), _connector='OR'), models.Q(('long_prompt_concurrency__isnull', True), ('long_prompt_concurrency__gte', 0), _connector='OR')), name='limits_not_negative')],
                    },
                ),
                migrations.CreateModel(
                    name='RoutingPolicy',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('name', models.CharField(max_length=64)),
                        ('version', models.IntegerField()),
                        ('body', models.JSONField()),
                        ('active', models.BooleanField()),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('created_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                    ],
                    options={
                        'ordering': ['-id'],
                        'constraints': [models.UniqueConstraint(models.F('tenant'), models.F('name'), models.F('version'), name='policy_version_unique'), models.UniqueConstraint(condition=models.Q(('active', True)), fields=('tenant', 'name'), name='policy_one_active'), models.CheckConstraint(condition=models.Q(('version__gt', 0), models.Q(('name', ''), _negated=True)), name='policy_named')],
                    },
                ),
                migrations.CreateModel(
                    name='RoutingPolicyDraft',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('name', models.CharField(max_length=64)),
                        ('body', models.JSONField()),
                        ('based_on', models.IntegerField(help_text='version that was active when the draft was created', null=True)),
                        ('updated_at', models.DateTimeField(auto_now=True)),
                        ('updated_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                    ],
                    options={
                        'ordering': ['-id'],
                        'constraints': [models.UniqueConstraint(fields=('tenant', 'name'), name='policy_draft_unique'), models.CheckConstraint(condition=models.Q(('name', ''), _negated=True), name='policy_draft_named')],
                    },
                ),
                migrations.CreateModel(
                    name='SavedView',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
                        ('screen', models.CharField(help_text="name of the screen's URL", max_length=40)),
                        ('name', models.CharField(max_length=40)),
                        ('query', models.CharField(blank=True, help_text='query string without the question mark', max_length=1000)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                    ],
                    options={
                        'ordering': ['id'],
                        'constraints': [models.UniqueConstraint(fields=('tenant', 'user', 'screen', 'name'), name='saved_view_unique'), models.CheckConstraint(condition=models.Q(('name', ''), _negated=True), name='saved_view_named')],
                    },
                ),
                migrations.CreateModel(
                    name='WebhookEndpoint',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('kind', models.CharField(choices=[('webhook', 'Webhook'), ('slack', 'Slack'), ('pagerduty', 'PagerDuty')], db_default='webhook', default='webhook', max_length=9)),
                        ('ciphertext', models.BinaryField(help_text="of a channel: Slack's URL, or PagerDuty's routing key", null=True)),
                        ('encryption_key_id', models.CharField(blank=True, db_default='', default='', max_length=16)),
                        ('url', models.CharField(max_length=500)),
                        ('description', models.CharField(blank=True, max_length=200)),
                        ('event_types', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=40), blank=True, default=list, help_text='empty: all types', size=None)),
                        ('active', models.BooleanField(default=True)),
                        ('disabled_because', models.CharField(blank=True, help_text='why the platform disabled it', max_length=200)),
                        ('failing_since', models.DateTimeField(help_text='the first failure after the last success', null=True)),
                        ('nonce', models.CharField(default=tenants.models.webhooks.new_nonce, max_length=32)),
                        ('previous_nonce', models.CharField(blank=True, max_length=32)),
                        ('previous_expires_at', models.DateTimeField(null=True)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                    ],
                ),
                migrations.CreateModel(
                    name='WebhookEvent',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('public_id', models.CharField(default=tenants.models.webhooks.new_public_id, max_length=40, unique=True)),
                        ('event_type', models.CharField(max_length=40)),
                        ('deduplication_key', models.CharField(help_text='unique in the tenant', max_length=120)),
                        ('payload', models.JSONField()),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                    ],
                    options={
                        'indexes': [models.Index(fields=['tenant', '-id'], name='webhook_event_tenant'), models.Index(fields=['created_at'], name='webhook_event_created')],
                        'constraints': [models.UniqueConstraint(fields=('tenant', 'deduplication_key'), name='webhook_event_once')],
                    },
                ),
                migrations.CreateModel(
                    name='WebhookDelivery',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('attempt_count', models.SmallIntegerField(default=0, help_text='since its creation or last replay')),
                        ('next_attempt_at', models.DateTimeField(default=tenants.models.outbox.utc_now)),
                        ('leased_until', models.DateTimeField(null=True)),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('event', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.webhookevent')),
                        ('endpoint', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.webhookendpoint')),
                        ('state', models.CharField(choices=[('pending', 'Pending'), ('delivered', 'Delivered'), ('failed', 'Failed')], default='pending', max_length=9)),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                    ],
                    options={
                        'indexes': [models.Index(condition=models.Q(('state', 'pending')), fields=['next_attempt_at'], name='webhook_delivery_due'), models.Index(condition=models.Q(('leased_until__isnull', False), ('state', 'pending')), fields=['tenant'], name='webhook_delivery_leased'), models.Index(fields=['endpoint', '-id'], name='webhook_delivery_endpoint')],
                        'constraints': [models.UniqueConstraint(fields=('event', 'endpoint'), name='webhook_delivery_once')],
                    },
                ),
                migrations.CreateModel(
                    name='WebhookAttempt',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('delivery', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='attempts', to='tenants.webhookdelivery')),
                        ('attempted_at', models.DateTimeField()),
                        ('status', models.SmallIntegerField(help_text='HTTP status of the response; null: no response', null=True)),
                        ('duration_ms', models.IntegerField()),
                        ('error', models.CharField(blank=True, max_length=200)),
                        ('excerpt', models.TextField(blank=True, help_text='start of the response body')),
                    ],
                ),
                migrations.CreateModel(
                    name='OutboxEmail',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('attempt_count', models.SmallIntegerField(default=0, help_text='since its creation or last replay')),
                        ('next_attempt_at', models.DateTimeField(default=tenants.models.outbox.utc_now)),
                        ('leased_until', models.DateTimeField(null=True)),
                        ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                        ('roles', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=10), size=None)),
                        ('invitation', models.OneToOneField(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='outbox_email', to='tenants.invitation')),
                        ('subject', models.CharField(max_length=200)),
                        ('body', models.TextField(help_text='empty for an invitation, because the link is secret')),
                        ('created_at', models.DateTimeField(auto_now_add=True)),
                        ('state', models.CharField(choices=[('queued', 'Queued'), ('sent', 'Sent'), ('failed', 'Failed')], default='queued', max_length=9)),
                        ('sent_at', models.DateTimeField(null=True)),
                        ('error', models.CharField(blank=True, db_default='', default='', help_text='why the last attempt failed', max_length=200)),
                    ],
                    options={
                        'indexes': [models.Index(condition=models.Q(('state', 'queued')), fields=['next_attempt_at'], name='outbox_email_due'), models.Index(condition=models.Q(('sent_at__isnull', True)), fields=['id'], name='outbox_email_unsent')],
                    },
                ),
            ],
        ),
    ]
