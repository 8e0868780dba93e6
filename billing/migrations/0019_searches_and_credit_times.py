"""Searches of cross-encoders, decimals of exchange rates, and the times at which the balance of prepaid tenants changes.

Existing executions have no searches. Processes of the previous release write 0, and rates with 6 decimals.
"""

from importlib import import_module

from django.db import migrations, models
from django.db.models.functions import Now

_RULES = import_module("billing.migrations.0002_row_level_security")
_REASONING = import_module("billing.migrations.0006_reasoning_tokens")
RATED_LINE = _RULES.RATED_LINE.replace("CREATE VIEW", "CREATE OR REPLACE VIEW")
WITH_SEARCHES = (
    RATED_LINE.replace("answer_hit_output, price_ids", "answer_hit_output, searches, price_ids")
    .replace("'answer_hit_output']", "'answer_hit_output', 'searches']")
    .replace("e.answer_hit_output]", "e.answer_hit_output, e.searches]")
)
CHANGE_WITH_SEARCHES = _REASONING.VIEW.format(
    event=", e.reasoning_tokens * billed AS reasoning_tokens, e.searches * billed AS searches",
    adjustment=", CASE WHEN a.output = -e.output THEN -e.reasoning_tokens ELSE 0 END, a.searches",
)
_BALANCE = models.DateTimeField(
    blank=True, db_default=Now(), help_text='of a prepaid tenant: when credit starts or expires next', null=True
)


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0018_currencies_and_price_schedules'),
    ]

    operations = [
        migrations.AddField('UsageEvent', 'searches', models.IntegerField(db_default=0, help_text='of a cross-encoder')),
        migrations.AddField('Adjustment', 'searches', models.IntegerField(db_default=0, help_text='of a cross-encoder')),
        migrations.AddField('UsageRollup', 'searches', models.BigIntegerField(db_default=0, help_text='of cross-encoders')),
        # The rows of a view: before its columns are removed, it must not use them.
        migrations.RunSQL([WITH_SEARCHES], [RATED_LINE]),
        migrations.RunSQL([CHANGE_WITH_SEARCHES], ["DROP VIEW billing_usagechange", _REASONING.NEW_VIEW]),
        migrations.AlterField('MeteredUsage', 'component', models.CharField(choices=[('cache_storage', 'cache_storage'), ('machine_hours', 'machine_hours')], max_length=20)),
        migrations.AlterField('MeteredUsage', 'amount', models.BigIntegerField(help_text='tokens or machines')),
        migrations.AddField('Invoice', 'rate_digits', models.SmallIntegerField(db_default=6, default=6, help_text='decimals of display_rate and tax_rate')),
        migrations.AlterField('Invoice', 'display_rate', models.BigIntegerField(help_text='of the display currency per unit of the currency', null=True)),
        migrations.AlterField('Invoice', 'tax_rate', models.BigIntegerField(help_text='of the tax currency per unit of the currency', null=True)),
        # The time of the migration in existing rows, so that the balances of all prepaid tenants are computed once.
        migrations.AddField('BillingProfile', 'balance_changes_at', _BALANCE),
        migrations.AlterField('BillingProfile', 'balance_changes_at', models.DateTimeField(blank=True, help_text='of a prepaid tenant: when credit starts or expires next', null=True)),
    ]
