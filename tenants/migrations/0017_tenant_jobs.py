"""Jobs of tenants."""

import django.db.models.deletion
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0016_tenant_answer_cache_scope'),
    ]

    operations = [
        migrations.CreateModel(
            name='TenantJob',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(help_text='what the job does, such as cache-warming.run', max_length=64)),
                ('permission', models.CharField(help_text='needed to see the job', max_length=32)),
                ('parameters', models.JSONField(default=dict)),
                ('actor', models.JSONField(help_text='fields of the `tenants.audit.Actor` who started it')),
                ('status', models.CharField(choices=[('queued', 'Queued'), ('running', 'Running'), ('completed', 'Completed'), ('failed', 'Failed')], default='queued', max_length=9)),
                ('attempts', models.SmallIntegerField(default=0, help_text='runs, of which all but the last were interrupted')),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('started_at', models.DateTimeField(null=True)),
                ('ended_at', models.DateTimeField(null=True)),
                ('error', models.TextField(blank=True, help_text='why it failed, for the user')),
                ('result', models.TextField(blank=True)),
                ('content_type', models.CharField(blank=True, help_text='of the result', max_length=64)),
                ('filename', models.CharField(blank=True, help_text='of a result that is a file', max_length=128)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
            ],
            options={
                'indexes': [models.Index(fields=['tenant', '-id'], name='tenant_job_newest'), models.Index(condition=models.Q(('status__in', ('queued', 'running'))), fields=['id'], name='tenant_job_open'), models.Index(fields=['created_at'], name='tenant_job_created')],
            },
        ),
        rls.operations('tenants_tenantjob'),
    ]
