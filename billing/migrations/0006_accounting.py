"""The charts of accounts, which only the system's role sees, and the texts of a billing entity's emails."""

from __future__ import annotations

import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import tenants.one_line_text
from tenants.isolation import rls


def _email_text(subject: str) -> models.TextField[str, str]:
    return models.TextField(blank=True, db_default='', default='', help_text=f'added to the emails about {subject}', max_length=1000, validators=[tenants.one_line_text.check_lines])


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0005_tax_relief_and_rate_dates'),
    ]

    operations = [
        migrations.CreateModel(
            name='ChartOfAccounts',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('file_name', models.CharField(help_text='of the CSV file with the lines', max_length=100, validators=[tenants.one_line_text.check_line])),
                ('consultant', models.PositiveIntegerField(help_text="DATEV's number of the tax adviser", validators=[django.core.validators.MinValueValidator(1001), django.core.validators.MaxValueValidator(9999999)])),
                ('client', models.PositiveIntegerField(help_text="the tax adviser's number of the entity", validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(99999)])),
                ('first_month', models.PositiveSmallIntegerField(default=1, help_text='of the fiscal year; 1: January', validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(12)])),
                ('account_digits', models.PositiveSmallIntegerField(default=4, help_text='digits of general ledger accounts; accounts of customers have one more', validators=[django.core.validators.MinValueValidator(4), django.core.validators.MaxValueValidator(8)])),
                ('lines', models.JSONField(help_text='[{line, account, tax_category, rate_ppm, number, tax_key, with_tax}]')),
                ('changed_at', models.DateTimeField(auto_now=True)),
                ('entity', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, related_name='chart', to='billing.billingentity')),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('first_month__gte', 1), ('first_month__lte', 12)), name='chart_first_month')],
            },
        ),
        rls.system_only('billing_chartofaccounts'),
        rls.revoke('ALL', 'billing_chartofaccounts'),
        migrations.AddField('billingentity', 'issued_email_text', _email_text('issued documents')),
        migrations.AddField('billingentity', 'reminder_email_text', _email_text('reminders')),
        migrations.AddField('billingentity', 'suspension_email_text', _email_text('suspensions')),
    ]
