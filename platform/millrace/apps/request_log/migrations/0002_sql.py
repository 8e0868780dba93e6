"""Row-level security of the request log, and the triggers that write the days that change after their end."""

from django.db import migrations

from tenants.isolation import rls
from tenants.migration_operations import SqlFiles, combine

SQL = SqlFiles(__file__)
TABLES = (
    *('requestrecord', 'requestcontent', 'semanticentry', 'semanticevidence', 'warmedprompt', 'shadowcomparison'),
    *('requestrollup', 'changedday'),
)


class Migration(migrations.Migration):

    dependencies = [
        ('request_log', '0001_schema'),
        ('billing', '0002_sql'),
        ('feedback', '0002_sql'),
        ('tenants', '0002_sql'),
    ]

    operations = [
        combine(
            *(rls.operations(f'request_log_{table}') for table in TABLES),
            rls.revoke('INSERT, UPDATE, DELETE', 'request_log_requestrollup', 'request_log_requestrollupstate'),
            SQL.functions('request_log_records_changed', 'request_log_usage_changed'),
        ),
    ]
