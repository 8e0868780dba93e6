"""Row-level security of operations. Only operators see the tables."""

from django.db import migrations

from tenants.isolation import rls
from tenants.migration_operations import combine

READ_BY_APP = ('cordon', 'machinecost', 'replicasample')
HIDDEN_FROM_APP = ('healthevent', 'deployment', 'removeddeployment')


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0001_schema'),
        ('tenants', '0002_sql'),
    ]

    operations = [
        combine(
            *(rls.system_only(f'operations_{table}') for table in (*READ_BY_APP, *HIDDEN_FROM_APP)),
            rls.revoke('ALL', *(f'operations_{table}' for table in HIDDEN_FROM_APP)),
        ),
    ]
