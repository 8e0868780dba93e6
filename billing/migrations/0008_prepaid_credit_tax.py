"""Tax prepaid credit: purchases as documents, credit as payment, a tax currency, and the bank account of the seller.

Prepaid credit of before becomes credit that is taxed at its use. Documents and credit of before do not change.
"""

import billing.models.invoicing
import django.db.models.deletion
from django.db import migrations, models

PAIRS = (
    ("billing_creditgrant", "purchase_id", "billing_invoice"),
    ("billing_creditgrant", "payment_id", "billing_payment"),
)


def same_tenant(table: str, column: str, to: str) -> migrations.RunSQL:
    """Add a foreign key to a row of the same tenant."""
    name = f"{table}_{column}_of_tenant"
    return migrations.RunSQL(
        [f"ALTER TABLE {table} ADD CONSTRAINT {name} FOREIGN KEY ({column}, tenant_id) REFERENCES {to} (id, tenant_id)"],
        [f"ALTER TABLE {table} DROP CONSTRAINT {name}"],
    )


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0007_payment_events'),
    ]

    operations = [
        migrations.AddField('BillingEntity', 'iban', models.CharField(blank=True, db_default='', max_length=34, validators=[billing.models.invoicing.check_iban])),
        migrations.AddField('BillingEntity', 'bic', models.CharField(blank=True, db_default='', max_length=11, validators=[billing.models.invoicing.check_bic])),
        migrations.AddField('BillingEntity', 'voucher_type', models.CharField(choices=[('single_purpose', 'Single Purpose'), ('multi_purpose', 'Multi Purpose')], db_default='multi_purpose', default='multi_purpose', help_text='when prepaid credit is taxed: single_purpose at its purchase, multi_purpose at its use', max_length=14)),
        migrations.AddField('BillingEntity', 'tax_currency', models.CharField(blank=True, db_default='', help_text="currency of the entity's tax returns, if it is not USD", max_length=3, validators=[billing.models.invoicing.check_currency])),
        migrations.AddField('Invoice', 'prepaid', models.BigIntegerField(db_default=0, default=0, help_text='cents of the total that prepaid credit paid; of a purchase, all of it')),
        migrations.AddField('Invoice', 'tax_currency', models.CharField(blank=True, db_default='', default='', max_length=3)),
        migrations.AddField('Invoice', 'tax_rate', models.BigIntegerField(help_text='millionths of the tax currency per dollar', null=True)),
        migrations.AlterField('Invoice', 'invoice_type', models.CharField(choices=[('invoice', 'Invoice'), ('purchase', 'Purchase'), ('correction', 'Correction'), ('credit_note', 'Credit Note')], default='invoice', max_length=12)),
        migrations.AlterField('InvoiceLine', 'line_type', models.CharField(choices=[('usage', 'Usage'), ('commitment', 'Commitment'), ('prepaid', 'Prepaid'), ('credit', 'Credit'), ('rounding', 'Rounding')], default='usage', max_length=10)),
        migrations.AddConstraint('Invoice', models.CheckConstraint(condition=models.Q(('prepaid__gte', 0), ('prepaid__lte', models.F('total'))), name='invoice_prepaid')),
        migrations.AddField('CreditGrant', 'is_taxed', models.BooleanField(db_default=False, default=False, help_text='its purchase was taxed, so its use is not')),
        migrations.AddField('CreditGrant', 'purchase', models.ForeignKey(help_text='of prepaid credit', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='credit_grants', to='billing.invoice')),
        migrations.AddField('CreditGrant', 'payment', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='credit_grants', to='billing.payment')),
        migrations.AddConstraint('Payment', models.UniqueConstraint(fields=('id', 'tenant'), name='payment_of_tenant')),
        *(same_tenant(*pair) for pair in PAIRS),
    ]
