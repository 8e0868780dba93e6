"""Currencies of price books, invoices, payments and ledger transactions; weekdays and time zones of prices.

Existing rows are in USD, for all weekdays and in UTC. Processes of the previous release write the same.
"""

from importlib import import_module

from django.db import migrations, models

_RULES = import_module("billing.migrations.0002_row_level_security")
_MINUTES = "    int4range(from_minute, until_minute) WITH &&,\n"
NO_OVERLAP = _RULES.NO_OVERLAP.replace(_MINUTES, f"{_MINUTES}    int4range(from_weekday, until_weekday) WITH &&,\n")
DROP_OVERLAP = "ALTER TABLE billing_price DROP CONSTRAINT price_no_overlap"
_END = "    RETURN NULL;\nEND\n"
ONE_CURRENCY = """    PERFORM FROM billing_invoice invoice JOIN billing_ledgertransaction booked ON booked.id = NEW.transaction_id
    WHERE invoice.id = NEW.invoice_id AND invoice.currency <> booked.currency;
    IF FOUND THEN
        RAISE EXCEPTION 'ledger transaction % has another currency than its invoice', NEW.transaction_id
            USING ERRCODE = 'check_violation';
    END IF;
"""
_BALANCE = _RULES.CHECK_BALANCE.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0017_alert_acknowledgments'),
    ]

    operations = [
        migrations.RunSQL([DROP_OVERLAP], [_RULES.NO_OVERLAP]),
        migrations.RemoveConstraint(
            model_name='price',
            name='price_ranges',
        ),
        migrations.AddField(
            model_name='invoice',
            name='converted_tax',
            field=models.BigIntegerField(help_text='the tax in cents of the tax currency; None: tax times tax_rate', null=True),
        ),
        migrations.AddField(
            model_name='invoice',
            name='currency',
            field=models.CharField(db_default='USD', default='USD', help_text='of all other amounts', max_length=3),
        ),
        migrations.AddField(
            model_name='ledgertransaction',
            name='currency',
            field=models.CharField(db_default='USD', default='USD', help_text='of its entries', max_length=3),
        ),
        migrations.AddField(
            model_name='payment',
            name='currency',
            field=models.CharField(db_default='USD', default='USD', max_length=3),
        ),
        migrations.AddField(
            model_name='price',
            name='from_weekday',
            field=models.SmallIntegerField(db_default=0, default=0, help_text='0: Monday'),
        ),
        migrations.AddField(
            model_name='price',
            name='time_zone',
            field=models.CharField(db_default='UTC', default='UTC', help_text='of the ranges', max_length=64),
        ),
        migrations.AddField(
            model_name='price',
            name='until_weekday',
            field=models.SmallIntegerField(db_default=7, default=7),
        ),
        migrations.AddField(
            model_name='pricebook',
            name='currency',
            field=models.CharField(db_default='USD', default='USD', help_text='of its prices, and of the bills of its tenants', max_length=3),
        ),
        migrations.AlterField(
            model_name='invoice',
            name='tax_rate',
            field=models.BigIntegerField(help_text='millionths of the tax currency per unit of the currency', null=True),
        ),
        migrations.AddConstraint(
            model_name='price',
            constraint=models.CheckConstraint(condition=models.Q(('from_tokens__gte', 0), ('from_tokens__lt', models.F('until_tokens')), ('from_minute__gte', 0), ('from_minute__lt', models.F('until_minute')), ('until_minute__lte', 1440), ('from_weekday__gte', 0), ('from_weekday__lt', models.F('until_weekday')), ('until_weekday__lte', 7), models.Q(('effective_until__isnull', True), ('effective_until__gte', models.F('effective_from')), _connector='OR')), name='price_ranges'),
        ),
        migrations.AddConstraint(
            model_name='pricebook',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('name', 'list'), _negated=True), ('currency', 'USD'), _connector='OR'), name='price_book_list_in_usd'),
        ),
        migrations.RunSQL([NO_OVERLAP], [DROP_OVERLAP]),
        migrations.RunSQL([_BALANCE.replace(_END, ONE_CURRENCY + _END)], [_BALANCE]),
    ]
