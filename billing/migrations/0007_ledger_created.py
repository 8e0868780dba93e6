"""The index by which the journal reads a month of the ledger. It is created while the ledger is written."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):

    atomic = False

    dependencies = [
        ('billing', '0006_accounting'),
    ]

    operations = [
        AddIndexConcurrently('ledgertransaction', models.Index(fields=['created_at'], name='ledger_created')),
    ]
