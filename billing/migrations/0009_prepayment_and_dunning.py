"""Add the gate of prepaid tenants, and suspensions by dunning. Both are off until an operator sets them."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0008_prepaid_credit_tax'),
    ]

    operations = [
        migrations.AddField('BillingEntity', 'suspend_after_days', models.PositiveSmallIntegerField(blank=True, help_text='days past due after which a tenant is suspended; null: never', null=True)),
        migrations.AddField('BillingProfile', 'is_prepaid', models.BooleanField(db_default=False, default=False, help_text="requests are limited to the tenant's balance")),
        migrations.AddField('BillingProfile', 'suspended_at', models.DateTimeField(blank=True, help_text='by dunning; null: not by dunning', null=True)),
        migrations.AddField('Budget', 'is_balance', models.BooleanField(db_default=False, default=False, help_text='the gate of a prepaid tenant, which follows its balance')),
        migrations.AddConstraint('Budget', models.UniqueConstraint(condition=models.Q(('active', True), ('is_balance', True)), fields=('tenant',), name='budget_balance_once')),
        migrations.AlterField('InvoiceEmail', 'email_type', models.CharField(choices=[('issued', 'Issued'), ('reminder', 'Reminder'), ('suspension', 'Suspension')], max_length=10)),
    ]
