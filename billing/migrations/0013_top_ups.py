"""Add automatic top-ups with a saved payment method. They are off until a tenant sets them."""

import django.db.models.deletion
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0001_initial'),
        ('billing', '0012_price_terms'),
    ]

    operations = [
        migrations.AddField('BillingProfile', 'top_up_below', models.BigIntegerField(blank=True, help_text='cents of balance before tax below which credit is bought; null: never', null=True)),
        migrations.AddField('BillingProfile', 'top_up_cents', models.BigIntegerField(blank=True, help_text='cents of each automatic top-up', null=True)),
        migrations.AddField('BillingProfile', 'payment_customer', models.CharField(blank=True, db_default='', default='', max_length=150)),
        migrations.AddField('BillingProfile', 'payment_method', models.CharField(blank=True, db_default='', default='', help_text="the provider's identifier of a saved method", max_length=150)),
        migrations.CreateModel(
            name='TopUp',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('cents', models.BigIntegerField()),
                ('state', models.CharField(choices=[('pending', 'Pending'), ('succeeded', 'Succeeded'), ('failed', 'Failed')], default='pending', max_length=9)),
                ('reference', models.CharField(blank=True, help_text='of the payment; empty: not requested yet', max_length=200)),
                ('detail', models.CharField(blank=True, max_length=200)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to='tenants.tenant')),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('cents__gt', 0)), name='top_up_positive'), models.UniqueConstraint(condition=models.Q(('state', 'pending')), fields=('tenant',), name='top_up_pending_once')],
            },
        ),
        rls.operations('billing_topup'),
    ]
