"""Which months of usage were taken out of the database. Only the tables' owner writes it."""

import django.contrib.postgres.fields
from django.db import migrations, models

from tenants.isolation.db_roles import APP, SYSTEM


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0009_period_index'),
    ]

    operations = [
        migrations.CreateModel(
            name='UsageArchive',
            fields=[
                ('month', models.DateField(help_text='its first day', primary_key=True, serialize=False)),
                ('rows', models.BigIntegerField()),
                ('sha256', models.CharField(help_text='of its events as CSV', max_length=64)),
                ('periods', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), help_text='whose invoices its events are on', size=None)),
                ('detached_at', models.DateTimeField()),
                ('dropped_at', models.DateTimeField(null=True)),
                ('restored_at', models.DateTimeField(help_text='None: it is not in the database', null=True)),
            ],
        ),
        migrations.RunSQL(
            [f"REVOKE INSERT, UPDATE, DELETE ON billing_usagearchive FROM {APP}, {SYSTEM}"],
            [f"GRANT INSERT, UPDATE, DELETE ON billing_usagearchive TO {APP}, {SYSTEM}"],
        ),
    ]
