"""Store price terms of tenants. The previous release ignores them and must not draft invoices afterwards."""

import billing.models.invoicing
import django.db.models.deletion
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0011_reratings'),
        ('tenants', '0006_invitation_email'),
    ]

    operations = [
        migrations.AlterField(
            model_name='invoiceline',
            name='line_type',
            field=models.CharField(choices=[('usage', 'Usage'), ('commitment', 'Commitment'), ('prepaid', 'Prepaid'), ('credit', 'Credit'), ('one_off', 'One Off'), ('term', 'Term'), ('rounding', 'Rounding')], default='usage', max_length=10),
        ),
        migrations.CreateModel(
            name='PriceTerm',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('description', models.CharField(help_text='printed on invoices', max_length=200, validators=[billing.models.invoicing.check_line])),
                ('rule', models.JSONField()),
                ('first_month', models.CharField(max_length=7)),
                ('last_month', models.CharField(blank=True, max_length=7)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('last_month', ''), ('last_month__gte', models.F('first_month')), _connector='OR'), name='price_term_months')],
            },
        ),
        rls.operations("billing_priceterm"),
        migrations.RunSQL(
            [f"REVOKE INSERT, UPDATE, DELETE ON billing_priceterm FROM {APP}"],
            [f"GRANT INSERT, UPDATE, DELETE ON billing_priceterm TO {APP}"],
        ),
    ]
