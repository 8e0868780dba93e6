"""Row-level security of alerts."""

from django.db import migrations

from tenants.isolation import rls
from tenants.migration_operations import combine


class Migration(migrations.Migration):

    dependencies = [
        ('alerts', '0001_schema'),
        ('tenants', '0002_sql'),
    ]

    operations = [
        combine(
            rls.same_tenant('alerts_alertrule', 'project_id', 'tenants_project'),
            rls.operations('alerts_alertrule'),
            rls.operations('alerts_rulealert'),
        ),
    ]
