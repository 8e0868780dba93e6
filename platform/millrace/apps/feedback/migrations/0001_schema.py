"""Create the tables of feedback on requests.

Written by tools/reset_migrations.py.
"""

import django.db.models.functions.datetime
import tenants.migration_operations
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        tenants.migration_operations.CreateModels(
            operations=[
                migrations.CreateModel(
                    name='SubmittedFeedback',
                    fields=[
                        ('pk', models.CompositePrimaryKey('tenant_id', 'request_id', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('tenant_id', models.BigIntegerField()),
                        ('request_id', models.CharField(max_length=64)),
                        ('key_id', models.BigIntegerField()),
                        ('success', models.BooleanField(null=True)),
                        ('score', models.FloatField(null=True)),
                        ('label', models.CharField(max_length=64, null=True)),
                        ('metadata', models.JSONField(null=True)),
                        ('reported_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                    ],
                    options={
                        'constraints': [models.CheckConstraint(condition=models.Q(('score__isnull', True), ('score__range', (0, 1)), _connector='OR'), name='feedback_score'), models.CheckConstraint(condition=models.Q(('success__isnull', False), ('score__isnull', False), ('label__isnull', False), _connector='OR'), name='feedback_not_empty')],
                    },
                ),
            ],
        ),
    ]
