"""Store the answers of VIES about VAT IDs. Only operators see them, and they never change."""

from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0013_top_ups'),
    ]

    operations = [
        migrations.CreateModel(
            name='VatCheck',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('vat_id', models.CharField(help_text='in capitals, without separators', max_length=20)),
                ('is_valid', models.BooleanField()),
                ('name', models.CharField(blank=True, help_text='of the business, if its country reports it', max_length=200)),
                ('checked_at', models.DateTimeField()),
            ],
            options={
                'indexes': [models.Index(fields=['vat_id', '-id'], name='vat_check_newest')],
            },
        ),
        rls.system_only('billing_vatcheck'),
        rls.append_only('billing_vatcheck'),
        migrations.RunSQL(
            [f'REVOKE ALL ON billing_vatcheck FROM {APP}'],
            [f'GRANT SELECT, INSERT, UPDATE, DELETE ON billing_vatcheck TO {APP}'],
        ),
    ]
