"""Deployments that another server runs."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0002_deployment'),
        ('tenants', '0007_upstream_credentials'),
    ]

    operations = [
        migrations.AddField(
            model_name='deployment',
            name='allow_internal',
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AddField(
            model_name='deployment',
            name='command',
            field=models.TextField(blank=True, db_default='', default='', help_text='of a managed engine'),
        ),
        migrations.AddField(
            model_name='deployment',
            name='concurrency',
            field=models.IntegerField(db_default=256, default=256, help_text='concurrent requests of a replica'),
        ),
        migrations.AddField(
            model_name='deployment',
            name='credential',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.DO_NOTHING, to='tenants.upstreamcredential'),
        ),
        migrations.AddField(
            model_name='deployment',
            name='engine',
            field=models.CharField(db_default='millrace', default='millrace', help_text='millrace, or the engine of an upstream', max_length=16),
        ),
        migrations.AddField(
            model_name='deployment',
            name='images',
            field=models.BooleanField(db_default=False, default=False, help_text="whether the upstream's model reads images"),
        ),
        migrations.AddField(
            model_name='deployment',
            name='preset',
            field=models.CharField(blank=True, db_default='', default='', max_length=32),
        ),
        migrations.AddField(
            model_name='deployment',
            name='reasoning',
            field=models.BooleanField(db_default=False, default=False, help_text="whether the upstream's model reasons"),
        ),
        migrations.AddField(
            model_name='deployment',
            name='tools',
            field=models.BooleanField(db_default=True, default=True, help_text="whether the upstream's model calls tools"),
        ),
        migrations.AddField(
            model_name='deployment',
            name='upstream_model',
            field=models.CharField(blank=True, db_default='', default='', help_text="the model's name at the upstream", max_length=256),
        ),
        migrations.AddField(
            model_name='deployment',
            name='task',
            field=models.CharField(db_default='generate', default='generate', help_text="of an upstream's model", max_length=16),
        ),
        migrations.AddField(
            model_name='deployment',
            name='dimensions',
            field=models.IntegerField(help_text='numbers of a vector, if the task is embed', null=True),
        ),
    ]
