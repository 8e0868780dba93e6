"""Webhooks, and mails to members."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models

import tenants.models.webhooks
from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0005_keep_content'),
    ]

    operations = [
        migrations.CreateModel(
            name='Mail',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('roles', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=10), size=None)),
                ('subject', models.CharField(max_length=200)),
                ('text', models.TextField()),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('claimed_at', models.DateTimeField(null=True)),
                ('tries', models.SmallIntegerField(default=0)),
                ('sent_at', models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name='WebhookAttempt',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('status', models.SmallIntegerField(help_text="the answer's HTTP status; null: there was no answer", null=True)),
                ('ms', models.IntegerField(help_text='how long it took')),
                ('error', models.CharField(blank=True, max_length=200)),
                ('excerpt', models.TextField(blank=True, help_text="how the answer's body began")),
            ],
        ),
        migrations.CreateModel(
            name='WebhookDelivery',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('state', models.CharField(choices=[('pending', 'Pending'), ('delivered', 'Delivered'), ('failed', 'Failed')], default='pending', max_length=9)),
                ('tries', models.SmallIntegerField(default=0, help_text='since it was made or last replayed')),
                ('next_at', models.DateTimeField()),
                ('leased_until', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name='WebhookEndpoint',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('url', models.CharField(max_length=500)),
                ('description', models.CharField(blank=True, max_length=200)),
                ('kinds', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=40), blank=True, default=list, help_text='empty: every kind', size=None)),
                ('active', models.BooleanField(default=True)),
                ('disabled_because', models.CharField(blank=True, help_text='why the platform disabled it', max_length=200)),
                ('failing_since', models.DateTimeField(help_text='when the first failed that no success came after', null=True)),
                ('nonce', models.CharField(default=tenants.models.webhooks.new_nonce, max_length=32)),
                ('old_nonce', models.CharField(blank=True, max_length=32)),
                ('old_until', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name='WebhookEvent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uid', models.CharField(default=tenants.models.webhooks.new_uid, max_length=40, unique=True)),
                ('kind', models.CharField(max_length=40)),
                ('key', models.CharField(help_text='what makes it the same event, in the tenant', max_length=120)),
                ('payload', models.JSONField()),
                ('at', models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.AddField(
            model_name='mail',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant'),
        ),
        migrations.AddField(
            model_name='webhookattempt',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant'),
        ),
        migrations.AddField(
            model_name='webhookdelivery',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant'),
        ),
        migrations.AddField(
            model_name='webhookattempt',
            name='delivery',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='attempts', to='tenants.webhookdelivery'),
        ),
        migrations.AddField(
            model_name='webhookendpoint',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant'),
        ),
        migrations.AddField(
            model_name='webhookdelivery',
            name='endpoint',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.webhookendpoint'),
        ),
        migrations.AddField(
            model_name='webhookevent',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant'),
        ),
        migrations.AddField(
            model_name='webhookdelivery',
            name='event',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.webhookevent'),
        ),
        migrations.AddIndex(
            model_name='mail',
            index=models.Index(condition=models.Q(('sent_at__isnull', True)), fields=['id'], name='mail_unsent'),
        ),
        migrations.AddIndex(
            model_name='webhookevent',
            index=models.Index(fields=['tenant', '-id'], name='webhook_event_tenant'),
        ),
        migrations.AddIndex(
            model_name='webhookevent',
            index=models.Index(fields=['at'], name='webhook_event_at'),
        ),
        migrations.AddConstraint(
            model_name='webhookevent',
            constraint=models.UniqueConstraint(fields=('tenant', 'key'), name='webhook_event_once'),
        ),
        migrations.AddIndex(
            model_name='webhookdelivery',
            index=models.Index(condition=models.Q(('state', 'pending')), fields=['next_at'], name='webhook_delivery_due'),
        ),
        migrations.AddIndex(
            model_name='webhookdelivery',
            index=models.Index(condition=models.Q(('leased_until__isnull', False), ('state', 'pending')), fields=['tenant'], name='webhook_delivery_leased'),
        ),
        migrations.AddIndex(
            model_name='webhookdelivery',
            index=models.Index(fields=['endpoint', '-id'], name='webhook_delivery_endpoint'),
        ),
        migrations.AddConstraint(
            model_name='webhookdelivery',
            constraint=models.UniqueConstraint(fields=('event', 'endpoint'), name='webhook_delivery_once'),
        ),
        *(
            rls.operations(f"tenants_{name}")
            for name in ("mail", "webhookendpoint", "webhookevent", "webhookdelivery", "webhookattempt")
        ),
    ]
