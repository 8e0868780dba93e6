"""Give emails the columns that all outboxes share.

The platform's processes must not run meanwhile: those of the previous release read the removed column.
"""

import tenants.models.outbox
from django.db import migrations, models

from tenants.isolation import rls

FORWARD = """
UPDATE tenants_outboxemail SET
    state = CASE WHEN sent_at IS NOT NULL AND error = '' THEN 'sent'
        WHEN sent_at IS NOT NULL OR attempt_count >= 12 THEN 'failed' ELSE 'queued' END,
    next_attempt_at = coalesce(claimed_at + interval '2 minutes' * power(2, attempt_count), created_at)
"""
REVERSE = """
UPDATE tenants_outboxemail SET
    claimed_at = CASE WHEN attempt_count > 0 THEN next_attempt_at - interval '2 minutes' * power(2, attempt_count) END
"""


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0004_tenant_allowed_origins'),
    ]

    operations = [
        migrations.RenameField('OutboxEmail', 'attempts', 'attempt_count'),
        migrations.AlterField('OutboxEmail', 'attempt_count', models.SmallIntegerField(default=0, help_text='since its creation or last replay')),
        migrations.AddField('OutboxEmail', 'next_attempt_at', models.DateTimeField(default=tenants.models.outbox.utc_now)),
        migrations.AddField('OutboxEmail', 'leased_until', models.DateTimeField(null=True)),
        migrations.AddField('OutboxEmail', 'state', models.CharField(choices=[('queued', 'Queued'), ('sent', 'Sent'), ('failed', 'Failed')], default='queued', max_length=9)),
        rls.update_rows(FORWARD, REVERSE),
        migrations.RemoveField('OutboxEmail', 'claimed_at'),
        migrations.AddIndex('OutboxEmail', models.Index(condition=models.Q(('state', 'queued')), fields=['next_attempt_at'], name='outbox_email_due')),
        migrations.AlterField('WebhookDelivery', 'next_attempt_at', models.DateTimeField(default=tenants.models.outbox.utc_now)),
    ]
