"""Row-level security of feedback."""

from django.db import migrations

from tenants.isolation import rls
from tenants.migration_operations import combine


class Migration(migrations.Migration):

    dependencies = [
        ('feedback', '0001_schema'),
        ('tenants', '0002_sql'),
    ]

    operations = [
        combine(
            rls.operations('feedback_submittedfeedback'),
        ),
    ]
