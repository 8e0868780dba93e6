"""Row-level security of experiments, and the triggers that add and renew observations."""

from django.db import migrations

from tenants.isolation import rls
from tenants.migration_operations import SqlFiles, combine

SQL = SqlFiles(__file__)
TABLES = ('observation', 'unittotal', 'armtotal', 'experimentpoint')


class Migration(migrations.Migration):

    dependencies = [
        ('experiments', '0001_schema'),
        ('feedback', '0002_sql'),
        ('request_log', '0002_sql'),
        ('tenants', '0002_sql'),
    ]

    operations = [
        combine(
            *(rls.operations(f'experiments_{table}') for table in TABLES),
            SQL.functions('experiments_observe', 'experiments_renew'),
        ),
    ]
