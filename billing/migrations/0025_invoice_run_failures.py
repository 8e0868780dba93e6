"""Store why a run left out a tenant or a period. Only operators see it."""

import django.db.models.deletion
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0024_minor_units'),
    ]

    operations = [
        migrations.CreateModel(
            name='InvoiceRunFailure',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('reason', models.CharField(max_length=500)),
                ('period', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='billing.period')),
                ('tenant', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('period', 'tenant'), name='invoice_run_failure_once', nulls_distinct=False)],
            },
        ),
        rls.system_only('billing_invoicerunfailure'),
        migrations.RunSQL(
            [f'REVOKE ALL ON billing_invoicerunfailure FROM {APP}'],
            [f'GRANT SELECT, INSERT, UPDATE, DELETE ON billing_invoicerunfailure TO {APP}'],
        ),
    ]
