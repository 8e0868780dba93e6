"""Rollups of days of keys and of months, and the function by which queries choose them in one statement."""

from django.db import migrations, models

_FUNCTION = """
CREATE FUNCTION billing_rollup_coarse(bucket text, other text) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN (SELECT coarse_before = settled_before FROM billing_rollupstate LIMIT 1)
        THEN bucket ELSE other END
$$;
"""
_DELETE = "DELETE FROM billing_usagerollup WHERE bucket IN ('kdays', 'month')"


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0021_rollup_totals'),
    ]

    operations = [
        migrations.AlterField('usagerollup', 'bucket', models.CharField(choices=[('hour', 'Hour'), ('day', 'Day'), ('hours', 'Hour Total'), ('days', 'Day Total'), ('kdays', 'Key Day'), ('month', 'Month Total')], max_length=5)),
        migrations.AddField('rollupstate', 'coarse_before', models.DateTimeField(help_text='the same for days of keys, and for months', null=True)),
        migrations.RunSQL(migrations.RunSQL.noop, _DELETE),
        migrations.RunSQL(_FUNCTION, "DROP FUNCTION billing_rollup_coarse(text, text)"),
    ]
