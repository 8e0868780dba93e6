"""Store how many of an execution's output tokens are reasoning. Processes of the previous release write 0."""

from django.db import migrations, models

VIEW = """
CREATE OR REPLACE VIEW billing_usagechange WITH (security_invoker = true) AS
SELECT e.admitted_at, e.request_id, e.execution, e.settled_at, e.tenant_id, e.project_id, e.key_id, e.model,
    coalesce(rate_card.tier, '') AS tier, e.miss_reason,
    (e.outcome = 'completed')::int AS completed, (e.outcome = 'cancelled')::int AS cancelled,
    (e.outcome = 'failed')::int AS failed,
    e.uncached * billed AS uncached, e.cache_read * billed AS cache_read,
    e.cache_write_5m * billed AS cache_write_5m, e.cache_write_1h * billed AS cache_write_1h,
    e.output * billed AS output, e.answer_hit_input * billed AS answer_hit_input,
    e.answer_hit_output * billed AS answer_hit_output, e.unpinned_tokens * billed AS unpinned_tokens,
    e.cost_femto, e.saved_femto{event}
FROM billing_usageevent e
CROSS JOIN LATERAL (SELECT (e.outcome <> 'failed')::int AS billed) AS counted
LEFT JOIN billing_compiledratecard rate_card ON rate_card.id = e.price_version
UNION ALL
SELECT a.admitted_at, a.request_id, a.execution, a.created_at, a.tenant_id, a.project_id, a.key_id, a.model,
    coalesce(rate_card.tier, ''), e.miss_reason,
    CASE WHEN a.outcome IN ('failed', 'cancelled') THEN -(e.outcome = 'completed')::int ELSE 0 END,
    CASE a.outcome WHEN 'failed' THEN -(e.outcome = 'cancelled')::int
        WHEN 'cancelled' THEN (e.outcome = 'completed')::int ELSE 0 END,
    CASE a.outcome WHEN 'failed' THEN (e.outcome <> 'failed')::int ELSE 0 END,
    a.uncached, a.cache_read, a.cache_write_5m, a.cache_write_1h, a.output, a.answer_hit_input, a.answer_hit_output, 0,
    a.cost_femto, a.saved_femto{adjustment}
FROM billing_adjustment a
JOIN billing_usageevent e USING (admitted_at, request_id, execution)
LEFT JOIN billing_compiledratecard rate_card ON rate_card.id = a.price_version
"""
# An adjustment that removes the whole output also removes its reasoning.
NEW_VIEW = VIEW.format(
    event=", e.reasoning_tokens * billed AS reasoning_tokens",
    adjustment=", CASE WHEN a.output = -e.output THEN -e.reasoning_tokens ELSE 0 END",
)
OLD_VIEW = VIEW.format(event="", adjustment="")


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0005_invoice_rules'),
    ]

    operations = [
        migrations.AddField('UsageEvent', 'reasoning_tokens', models.IntegerField(db_default=0, help_text='part of output')),
        migrations.AddField('UsageRollup', 'reasoning_tokens', models.BigIntegerField(db_default=0, help_text='part of output')),
        migrations.RunSQL([NEW_VIEW], ["DROP VIEW billing_usagechange", OLD_VIEW]),
    ]
