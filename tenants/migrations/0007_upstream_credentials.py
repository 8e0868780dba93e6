"""Upstream credentials of the platform and of tenants, encrypted."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0006_invitation_email'),
    ]

    operations = [
        migrations.AlterField(
            model_name='changeeventrow',
            name='change_type',
            field=models.CharField(choices=[('credential', 'Credential'), ('key', 'Key'), ('limits', 'Limits'), ('member', 'Member'), ('policy', 'Policy'), ('tenant', 'Tenant')], max_length=10),
        ),
        migrations.CreateModel(
            name='UpstreamCredential',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=64)),
                ('model_names', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=64), blank=True, default=list, help_text="only of a tenant's", size=None)),
                ('ciphertext', models.BinaryField()),
                ('encryption_key_id', models.CharField(help_text='of the key in MILLRACE_CREDENTIAL_KEYS', max_length=8)),
                ('version', models.IntegerField(default=1, help_text='increases by 1 with each rotation of the secret')),
                ('daily_spend_limit_nano', models.BigIntegerField(help_text='nano-USD per day (UTC); null: no limit', null=True)),
                ('max_concurrency', models.IntegerField(help_text='concurrent requests of all replicas; null: no limit', null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('rotated_at', models.DateTimeField(null=True)),
                ('tenant', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.UniqueConstraint(fields=('tenant', 'name'), name='upstream_credential_name', nulls_distinct=False), models.CheckConstraint(condition=models.Q(models.Q(('daily_spend_limit_nano__isnull', True), ('daily_spend_limit_nano__gte', 0), _connector='OR'), models.Q(('max_concurrency__isnull', True), ('max_concurrency__gte', 1), _connector='OR')), name='upstream_credential_limits')],
            },
        ),
        rls.operations("tenants_upstreamcredential"),
    ]
