"""Decimals of converted amounts. Existing documents have two, also in currencies with another minor unit."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0021_rollup_totals'),
    ]

    operations = [
        migrations.AddField('invoice', 'display_digits', models.SmallIntegerField(db_default=2, default=2, help_text='decimals in the display currency')),
        migrations.AddField('invoice', 'tax_digits', models.SmallIntegerField(db_default=2, default=2, help_text='decimals of converted_tax')),
        migrations.AlterField('invoice', 'converted_tax', models.BigIntegerField(help_text='the tax in the tax currency, in units of 10^-tax_digits; None: tax times tax_rate', null=True)),
    ]
