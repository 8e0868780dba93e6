"""Saved views of lists, and the choice of a member to receive alerts by email."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0011_routing_policy_drafts'),
    ]

    operations = [
        migrations.AddField('membership', 'alert_emails', models.BooleanField(db_default=True, default=True)),
        migrations.CreateModel(
            name='SavedView',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('screen', models.CharField(help_text="name of the screen's URL", max_length=40)),
                ('name', models.CharField(max_length=40)),
                ('query', models.CharField(blank=True, help_text='query string without the question mark', max_length=1000)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['id'],
                'constraints': [models.UniqueConstraint(fields=('tenant', 'user', 'screen', 'name'), name='saved_view_unique'), models.CheckConstraint(condition=models.Q(('name', ''), _negated=True), name='saved_view_named')],
            },
        ),
        rls.operations('tenants_savedview'),
    ]
