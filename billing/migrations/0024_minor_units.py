"""Decimals of converted amounts, and a higher limit of the gates of prepaid tenants.

Existing documents have two decimals, also in currencies with another minor unit. One-off lines that a debit note marked as
billed, without containing them, become due.
"""

from django.db import migrations, models

from tenants.isolation import rls

MAKE_DUE = """
UPDATE billing_oneoffline SET invoice_id = NULL FROM billing_invoice i
WHERE i.id = invoice_id AND i.invoice_type = 'debit_note'
"""
LOWER_GATES = "UPDATE billing_budget SET amount = 100000000000000000 WHERE amount > 100000000000000000"


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0023_usage_indexes'),
    ]

    operations = [
        migrations.RemoveConstraint('budget', 'budget_amounts'),
        rls.update_rows(MAKE_DUE, LOWER_GATES),
        migrations.AddConstraint(
            'budget',
            models.CheckConstraint(condition=models.Q(models.Q(('amount__range', (0, 100000000000000000)), models.Q(('amount__range', (0, 4000000000000000000)), ('is_balance', True)), _connector='OR'), models.Q(('rollover_limit__range', (0, 100000000000000000)), ('temporary_increase__range', (0, 100000000000000000)))), name='budget_amounts'),
        ),
        migrations.AddField('invoice', 'display_digits', models.SmallIntegerField(db_default=2, default=2, help_text='decimals in the display currency')),
        migrations.AddField('invoice', 'tax_digits', models.SmallIntegerField(db_default=2, default=2, help_text='decimals of converted_tax')),
        migrations.AlterField('invoice', 'converted_tax', models.BigIntegerField(help_text='the tax in the tax currency, in units of 10^-tax_digits; None: tax times tax_rate', null=True)),
    ]
