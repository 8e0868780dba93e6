"""Totals of all keys in the rollups, and functions by which queries choose them in one statement.

The functions are stable, so the planner knows their values.
"""

from django.db import migrations, models

_FUNCTIONS = """
CREATE FUNCTION billing_rollup_bucket(bucket text) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN (SELECT totals_before = settled_before FROM billing_rollupstate LIMIT 1)
        THEN bucket || 's' ELSE bucket END
$$;
CREATE FUNCTION billing_rollup_settled_before() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce((SELECT settled_before FROM billing_rollupstate LIMIT 1), '1970-01-01 00:00:00+00')
$$;
"""
_DROP = "DROP FUNCTION billing_rollup_bucket(text); DROP FUNCTION billing_rollup_settled_before();"
_DELETE = "DELETE FROM billing_usagerollup WHERE bucket IN ('hours', 'days')"


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0020_host_tokens'),
    ]

    operations = [
        migrations.AlterField('usagerollup', 'bucket', models.CharField(choices=[('hour', 'Hour'), ('day', 'Day'), ('hours', 'Hour Total'), ('days', 'Day Total')], max_length=5)),
        migrations.AddField('rollupstate', 'totals_before', models.DateTimeField(help_text='the totals are complete if it is `settled_before`', null=True)),
        migrations.AddIndex('usagerollup', models.Index(fields=['key_id', 'bucket', 'start'], name='rollup_key')),
        migrations.RunSQL(migrations.RunSQL.noop, _DELETE),
        migrations.RunSQL(_FUNCTIONS, _DROP),
    ]
