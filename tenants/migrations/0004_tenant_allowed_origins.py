"""The origins of web pages that may read the responses of a tenant's keys."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0003_tenant_unknown_parameters'),
    ]

    operations = [
        migrations.AddField(
            model_name='tenant',
            name='allowed_origins',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='origins of web pages that may call the API'),
        ),
    ]
