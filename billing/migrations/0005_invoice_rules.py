"""Validate the texts and codes of invoices; allow wholly credited invoices to be voided and written-off ones to be paid.

Only the function of a trigger changes in the database.
"""

import billing.models.invoicing
from django.db import migrations, models

GUARD = """
CREATE OR REPLACE FUNCTION billing_guard_invoice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state <> 'draft' AND (
        TG_OP = 'DELETE'
        OR to_jsonb(NEW) - 'state' <> to_jsonb(OLD) - 'state'
        OR (OLD.state, NEW.state) NOT IN (TRANSITIONS)
    ) THEN
        RAISE EXCEPTION 'invoice % is final: % rejected', OLD.number, TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$
"""
BEFORE = "('open', 'paid'), ('paid', 'open'), ('open', 'void'), ('open', 'uncollectible')"
AFTER = f"{BEFORE}, ('paid', 'void'), ('uncollectible', 'paid')"


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0004_outbox'),
    ]

    operations = [
        migrations.RunSQL([GUARD.replace("TRANSITIONS", AFTER)], [GUARD.replace("TRANSITIONS", BEFORE)]),
        migrations.AlterField(
            model_name='billingentity',
            name='city',
            field=models.CharField(blank=True, max_length=100, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingentity',
            name='country',
            field=models.CharField(max_length=2, validators=[billing.models.invoicing.check_country]),
        ),
        migrations.AlterField(
            model_name='billingentity',
            name='name',
            field=models.CharField(max_length=200, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingentity',
            name='payment_details',
            field=models.TextField(blank=True, validators=[billing.models.invoicing.check_lines]),
        ),
        migrations.AlterField(
            model_name='billingentity',
            name='postcode',
            field=models.CharField(blank=True, max_length=20, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingentity',
            name='region',
            field=models.CharField(blank=True, max_length=100, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingentity',
            name='registration',
            field=models.CharField(blank=True, max_length=50, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingentity',
            name='street',
            field=models.CharField(blank=True, max_length=200, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingentity',
            name='vat_id',
            field=models.CharField(blank=True, max_length=20, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='city',
            field=models.CharField(blank=True, max_length=100, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='country',
            field=models.CharField(max_length=2, validators=[billing.models.invoicing.check_country]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='currency',
            field=models.CharField(default='USD', help_text='shown in addition to USD', max_length=3, validators=[billing.models.invoicing.check_currency]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='name',
            field=models.CharField(max_length=200, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='po_number',
            field=models.CharField(blank=True, max_length=100, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='postcode',
            field=models.CharField(blank=True, max_length=20, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='region',
            field=models.CharField(blank=True, max_length=100, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='street',
            field=models.CharField(blank=True, max_length=200, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='billingprofile',
            name='vat_id',
            field=models.CharField(blank=True, max_length=20, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='exchangerate',
            name='currency',
            field=models.CharField(max_length=3, validators=[billing.models.invoicing.check_currency]),
        ),
        migrations.AlterField(
            model_name='invoice',
            name='reason',
            field=models.CharField(blank=True, max_length=200, validators=[billing.models.invoicing.check_line]),
        ),
        migrations.AlterField(
            model_name='invoiceline',
            name='line_type',
            field=models.CharField(choices=[('usage', 'Usage'), ('commitment', 'Commitment'), ('credit', 'Credit'), ('rounding', 'Rounding')], default='usage', max_length=10),
        ),
        migrations.AlterField(
            model_name='taxrule',
            name='country',
            field=models.CharField(blank=True, max_length=2, validators=[billing.models.invoicing.check_country]),
        ),
    ]
