"""Drafts of routing policies."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0010_experiment'),
    ]

    operations = [
        migrations.CreateModel(
            name='RoutingPolicyDraft',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=64)),
                ('body', models.JSONField()),
                ('based_on', models.IntegerField(help_text='version that was active when the draft was created', null=True)),
                ('updated_at', models.DateTimeField(auto_now=True)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                ('updated_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.UniqueConstraint(fields=('tenant', 'name'), name='policy_draft_unique'), models.CheckConstraint(condition=models.Q(('name', ''), _negated=True), name='policy_draft_named')],
            },
        ),
        rls.operations("tenants_routingpolicydraft"),
    ]
