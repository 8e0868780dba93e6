"""Row-level security of batches."""

from django.db import migrations

from tenants.isolation import rls
from tenants.migration_operations import combine


class Migration(migrations.Migration):

    dependencies = [
        ('batches', '0001_schema'),
        ('tenants', '0002_sql'),
    ]

    operations = [
        combine(
            *(rls.operations(f'batches_{table}') for table in ('file', 'batch', 'line')),
        ),
    ]
