"""Store the events of payment providers, which only operators see, and the charge of a payment.

Processes of the previous release write an empty charge.
"""

from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0006_reasoning_tokens'),
    ]

    operations = [
        migrations.AddField('Payment', 'charge', models.CharField(blank=True, db_default='', help_text="the provider's identifier", max_length=200)),
        migrations.AddIndex('Payment', models.Index(condition=models.Q(('charge', ''), _negated=True), fields=['provider', 'charge'], name='payment_by_charge')),
        migrations.CreateModel(
            name='PaymentEvent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('provider', models.CharField(max_length=20)),
                ('reference', models.CharField(help_text="the provider's identifier", max_length=200)),
                ('event_type', models.CharField(max_length=200)),
                ('created_at', models.DateTimeField(help_text='by the provider')),
                ('received_at', models.DateTimeField(auto_now_add=True)),
                ('status', models.CharField(choices=[('handled', 'Handled'), ('ignored', 'Ignored'), ('failed', 'Failed')], max_length=10)),
                ('detail', models.CharField(blank=True, max_length=500)),
            ],
            options={
                'indexes': [models.Index(fields=['received_at'], name='payment_event_age')],
                'constraints': [models.UniqueConstraint(fields=('provider', 'reference'), name='payment_event_once')],
            },
        ),
        rls.system_only('billing_paymentevent'),
        migrations.RunSQL(
            [f'REVOKE ALL ON billing_paymentevent FROM {APP}'],
            [f'GRANT SELECT, INSERT, UPDATE, DELETE ON billing_paymentevent TO {APP}'],
        ),
    ]
