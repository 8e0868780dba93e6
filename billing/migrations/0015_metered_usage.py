"""Store metered usage: cache storage, machine-hours and searches. The previous release ignores it."""

import django.db.models.deletion
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0014_vat_checks'),
        ('tenants', '0006_invitation_email'),
    ]

    operations = [
        migrations.AlterField(
            model_name='invoiceline',
            name='line_type',
            field=models.CharField(choices=[('usage', 'Usage'), ('commitment', 'Commitment'), ('prepaid', 'Prepaid'), ('credit', 'Credit'), ('one_off', 'One Off'), ('metered', 'Metered'), ('term', 'Term'), ('rounding', 'Rounding')], default='usage', max_length=10),
        ),
        migrations.AlterField(
            model_name='price',
            name='component',
            field=models.CharField(choices=[('uncached', 'uncached'), ('cache_read', 'cache_read'), ('cache_write_5m', 'cache_write_5m'), ('cache_write_1h', 'cache_write_1h'), ('output', 'output'), ('answer_hit_input', 'answer_hit_input'), ('answer_hit_output', 'answer_hit_output'), ('cache_storage', 'cache_storage'), ('machine_hours', 'machine_hours'), ('searches', 'searches')], max_length=20),
        ),
        migrations.CreateModel(
            name='MeteredUsage',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('reference', models.CharField(help_text="the sender's identifier", max_length=200)),
                ('component', models.CharField(choices=[('cache_storage', 'cache_storage'), ('machine_hours', 'machine_hours'), ('searches', 'searches')], max_length=20)),
                ('model', models.CharField(help_text='the model or deployment', max_length=128)),
                ('amount', models.BigIntegerField(help_text='tokens, machines or searches')),
                ('started_at', models.DateTimeField()),
                ('ended_at', models.DateTimeField()),
                ('price_id', models.BigIntegerField()),
                ('nano_per_million', models.BigIntegerField()),
                ('cost_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('invoice_period', models.BigIntegerField(help_text='the billing period whose invoice includes it')),
                ('recorded_at', models.DateTimeField(auto_now_add=True)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
            options={
                'indexes': [models.Index(fields=['invoice_period', 'tenant'], name='metered_usage_period')],
                'constraints': [models.UniqueConstraint(fields=('tenant', 'reference'), name='metered_usage_once'), models.CheckConstraint(condition=models.Q(('amount__gt', 0), ('cost_femto__gte', 0), ('ended_at__gte', models.F('started_at'))), name='metered_usage_amounts')],
            },
        ),
        rls.operations("billing_meteredusage"),
        rls.append_only("billing_meteredusage"),
        migrations.RunSQL(
            [f"REVOKE INSERT ON billing_meteredusage FROM {APP}"],
            [f"GRANT INSERT ON billing_meteredusage TO {APP}"],
        ),
    ]
