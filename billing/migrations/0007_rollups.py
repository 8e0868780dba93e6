"""Corrections among the rated lines; sums of usage by hour and day; how the events settled lately are found."""

import django.contrib.postgres.indexes
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP

RATED_LINE = """
CREATE OR REPLACE VIEW billing_rated_line WITH (security_invoker = true) AS
SELECT e.tenant_id, e.project_id, e.key_id, e.admitted_at, e.request_id, e.execution, e.invoice_period,
    used.component, used.price_id, used.tokens::bigint AS tokens,
    used.tokens::numeric(38, 0) * price.nano_per_million AS femto
FROM (
    SELECT tenant_id, project_id, key_id, admitted_at, request_id, execution, invoice_period, uncached, cache_read,
        cache_write_5m, cache_write_1h, output, answer_hit_input, answer_hit_output, price_ids
    FROM billing_usageevent
    UNION ALL
    SELECT tenant_id, project_id, key_id, admitted_at, request_id, execution, invoice_period, uncached, cache_read,
        cache_write_5m, cache_write_1h, output, answer_hit_input, answer_hit_output, price_ids
    FROM billing_adjustment
) AS e
CROSS JOIN LATERAL unnest(
    ARRAY['uncached', 'cache_read', 'cache_write_5m', 'cache_write_1h', 'output',
        'answer_hit_input', 'answer_hit_output'],
    ARRAY[e.uncached, e.cache_read, e.cache_write_5m, e.cache_write_1h, e.output,
        e.answer_hit_input, e.answer_hit_output],
    e.price_ids
) AS used (component, tokens, price_id)
JOIN billing_price price ON price.id = used.price_id
"""
WITHOUT_ADJUSTMENTS = """
CREATE OR REPLACE VIEW billing_rated_line WITH (security_invoker = true) AS
SELECT e.tenant_id, e.project_id, e.key_id, e.admitted_at, e.request_id, e.execution, e.invoice_period,
    used.component, used.price_id, used.tokens::bigint AS tokens,
    used.tokens::numeric(38, 0) * price.nano_per_million AS femto
FROM billing_usageevent e
CROSS JOIN LATERAL unnest(
    ARRAY['uncached', 'cache_read', 'cache_write_5m', 'cache_write_1h', 'output',
        'answer_hit_input', 'answer_hit_output'],
    ARRAY[e.uncached, e.cache_read, e.cache_write_5m, e.cache_write_1h, e.output,
        e.answer_hit_input, e.answer_hit_output],
    e.price_ids
) AS used (component, tokens, price_id)
JOIN billing_price price ON price.id = used.price_id
"""
# A failed execution's tokens count for nothing. A correction takes tokens back, and may change how its execution ended.
USAGE_CHANGE = """
CREATE VIEW billing_usagechange WITH (security_invoker = true) AS
SELECT e.admitted_at, e.request_id, e.execution, e.settled_at, e.tenant_id, e.project_id, e.key_id, e.model,
    coalesce(sheet.tier, '') AS tier, e.miss_reason,
    (e.outcome = 'completed')::int AS completed, (e.outcome = 'cancelled')::int AS cancelled,
    (e.outcome = 'failed')::int AS failed,
    e.uncached * billed AS uncached, e.cache_read * billed AS cache_read,
    e.cache_write_5m * billed AS cache_write_5m, e.cache_write_1h * billed AS cache_write_1h,
    e.output * billed AS output, e.answer_hit_input * billed AS answer_hit_input,
    e.answer_hit_output * billed AS answer_hit_output, e.unpinned_tokens * billed AS unpinned_tokens,
    e.cost_femto, e.saved_femto
FROM billing_usageevent e
CROSS JOIN LATERAL (SELECT (e.outcome <> 'failed')::int AS billed) AS counted
LEFT JOIN billing_pricesheet sheet ON sheet.id = e.price_version
UNION ALL
SELECT a.admitted_at, a.request_id, a.execution, a.made_at, a.tenant_id, a.project_id, a.key_id, a.model,
    coalesce(sheet.tier, ''), e.miss_reason,
    CASE WHEN a.outcome IN ('failed', 'cancelled') THEN -(e.outcome = 'completed')::int ELSE 0 END,
    CASE a.outcome WHEN 'failed' THEN -(e.outcome = 'cancelled')::int
        WHEN 'cancelled' THEN (e.outcome = 'completed')::int ELSE 0 END,
    CASE a.outcome WHEN 'failed' THEN (e.outcome <> 'failed')::int ELSE 0 END,
    a.uncached, a.cache_read, a.cache_write_5m, a.cache_write_1h, a.output, a.answer_hit_input, a.answer_hit_output, 0,
    a.cost_femto, a.saved_femto
FROM billing_adjustment a
JOIN billing_usageevent e USING (admitted_at, request_id, execution)
LEFT JOIN billing_pricesheet sheet ON sheet.id = a.price_version
"""


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0006_window_functions'),
    ]

    operations = [
        migrations.CreateModel(
            name='UsageChange',
            fields=[
                ('tenant_id', models.BigIntegerField()),
                ('project_id', models.BigIntegerField()),
                ('key_id', models.BigIntegerField()),
                ('model', models.CharField(max_length=128)),
                ('tier', models.CharField(max_length=10)),
                ('miss_reason', models.CharField(max_length=32)),
                ('completed', models.BigIntegerField()),
                ('cancelled', models.BigIntegerField()),
                ('failed', models.BigIntegerField()),
                ('uncached', models.BigIntegerField()),
                ('cache_read', models.BigIntegerField()),
                ('cache_write_5m', models.BigIntegerField()),
                ('cache_write_1h', models.BigIntegerField()),
                ('output', models.BigIntegerField()),
                ('answer_hit_input', models.BigIntegerField()),
                ('answer_hit_output', models.BigIntegerField()),
                ('unpinned_tokens', models.BigIntegerField()),
                ('cost_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('saved_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('pk', models.CompositePrimaryKey('admitted_at', 'request_id', 'execution', blank=True, editable=False, primary_key=True, serialize=False)),
                ('admitted_at', models.DateTimeField()),
                ('request_id', models.CharField(max_length=64)),
                ('execution', models.SmallIntegerField()),
                ('settled_at', models.DateTimeField(help_text='when it was written down')),
            ],
            options={
                'managed': False,
            },
        ),
        migrations.CreateModel(
            name='RollupState',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('settled_before', models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name='UsageRollup',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant_id', models.BigIntegerField()),
                ('project_id', models.BigIntegerField()),
                ('key_id', models.BigIntegerField()),
                ('model', models.CharField(max_length=128)),
                ('tier', models.CharField(max_length=10)),
                ('miss_reason', models.CharField(max_length=32)),
                ('completed', models.BigIntegerField()),
                ('cancelled', models.BigIntegerField()),
                ('failed', models.BigIntegerField()),
                ('uncached', models.BigIntegerField()),
                ('cache_read', models.BigIntegerField()),
                ('cache_write_5m', models.BigIntegerField()),
                ('cache_write_1h', models.BigIntegerField()),
                ('output', models.BigIntegerField()),
                ('answer_hit_input', models.BigIntegerField()),
                ('answer_hit_output', models.BigIntegerField()),
                ('unpinned_tokens', models.BigIntegerField()),
                ('cost_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('saved_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('bucket', models.CharField(choices=[('hour', 'Hour'), ('day', 'Day')], max_length=4)),
                ('start', models.DateTimeField()),
            ],
            options={
                'indexes': [models.Index(fields=['bucket', 'start'], name='rollup_start')],
                'constraints': [models.UniqueConstraint(fields=('tenant_id', 'bucket', 'start', 'project_id', 'key_id', 'model', 'tier', 'miss_reason'), name='rollup_once')],
            },
        ),
        migrations.RunSQL([RATED_LINE], [WITHOUT_ADJUSTMENTS]),
        migrations.RunSQL([USAGE_CHANGE], ["DROP VIEW billing_usagechange"]),
        migrations.AddIndex(
            model_name='usageevent',
            index=django.contrib.postgres.indexes.BrinIndex(models.F('settled_at'), name='billing_usage_settled'),
        ),
        rls.operations("billing_usagerollup"),
        migrations.RunSQL(
            [f"REVOKE INSERT, UPDATE, DELETE ON billing_usagerollup, billing_rollupstate FROM {APP}"],
            [f"GRANT INSERT, UPDATE, DELETE ON billing_usagerollup, billing_rollupstate TO {APP}"],
        ),
    ]
