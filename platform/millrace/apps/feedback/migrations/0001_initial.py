"""Feedback on requests. A tenant sees only its own rows."""

import django.db.models.functions.datetime
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('tenants', '0002_row_level_security'),
    ]

    operations = [
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
        rls.operations('feedback_submittedfeedback'),
    ]

