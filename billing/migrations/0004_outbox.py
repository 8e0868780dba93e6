"""Give emails about invoices the columns that all outboxes share.

The platform's processes must not run meanwhile: those of the previous release read the removed column.
"""

import tenants.models.outbox
from django.db import migrations, models

from tenants.isolation import rls

FORWARD = """
UPDATE billing_invoiceemail SET
    state = CASE WHEN sent_at IS NOT NULL THEN 'sent' WHEN attempt_count >= 12 THEN 'failed' ELSE 'queued' END,
    next_attempt_at = coalesce(claimed_at + interval '2 minutes' * power(2, attempt_count), created_at)
"""
REVERSE = """
UPDATE billing_invoiceemail SET
    claimed_at = CASE WHEN attempt_count > 0 THEN next_attempt_at - interval '2 minutes' * power(2, attempt_count) END
"""


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0003_budget_functions'),
        ('tenants', '0005_outbox'),
    ]

    operations = [
        migrations.RenameField('InvoiceEmail', 'attempts', 'attempt_count'),
        migrations.AlterField('InvoiceEmail', 'attempt_count', models.SmallIntegerField(default=0, help_text='since its creation or last replay')),
        migrations.AddField('InvoiceEmail', 'next_attempt_at', models.DateTimeField(default=tenants.models.outbox.utc_now)),
        migrations.AddField('InvoiceEmail', 'leased_until', models.DateTimeField(null=True)),
        migrations.AddField('InvoiceEmail', 'state', models.CharField(choices=[('queued', 'Queued'), ('sent', 'Sent'), ('failed', 'Failed')], default='queued', max_length=9)),
        migrations.AddField('InvoiceEmail', 'error', models.CharField(blank=True, default='', help_text='why the last attempt failed', max_length=200)),
        rls.update_rows(FORWARD, REVERSE),
        migrations.RemoveField('InvoiceEmail', 'claimed_at'),
        migrations.AddIndex('InvoiceEmail', models.Index(condition=models.Q(('state', 'queued')), fields=['next_attempt_at'], name='invoice_email_due')),
    ]
