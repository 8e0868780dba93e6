"""Windows of budgets, slices of them leased to gateways, corrections of usage events; the reconciler's reports."""

import django.contrib.postgres.fields
from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


def read_only(table: str) -> migrations.RunSQL:
    """Have the app's role change nothing: what requests may use is moved by gateways and the settler alone."""
    return migrations.RunSQL(
        [f"REVOKE INSERT, UPDATE, DELETE ON {table} FROM {APP}"],
        [f"GRANT INSERT, UPDATE, DELETE ON {table} TO {APP}"],
    )


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0004_prices'),
    ]

    operations = [
        migrations.CreateModel(
            name='Reconciliation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('windows', models.IntegerField(help_text='compared')),
                ('differences', models.JSONField(default=list)),
                ('corrected', models.IntegerField(default=0)),
                ('overdue_slices', models.IntegerField(default=0)),
                ('quarantined', models.IntegerField(default=0, help_text='messages nobody has looked at')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='Adjustment',
            fields=[
                ('pk', models.CompositePrimaryKey('admitted_at', 'request_id', 'execution', 'outcome', blank=True, editable=False, primary_key=True, serialize=False)),
                ('admitted_at', models.DateTimeField()),
                ('request_id', models.CharField(max_length=64)),
                ('execution', models.SmallIntegerField()),
                ('outcome', models.CharField(choices=[('failed', 'Failed'), ('cancelled', 'Cancelled'), ('late', 'Late')], max_length=16)),
                ('tenant_id', models.BigIntegerField()),
                ('project_id', models.BigIntegerField()),
                ('key_id', models.BigIntegerField()),
                ('model', models.CharField(max_length=128)),
                ('uncached', models.IntegerField()),
                ('cache_read', models.IntegerField()),
                ('cache_write_5m', models.IntegerField()),
                ('cache_write_1h', models.IntegerField()),
                ('output', models.IntegerField()),
                ('answer_hit_input', models.IntegerField()),
                ('answer_hit_output', models.IntegerField()),
                ('price_version', models.BigIntegerField(null=True)),
                ('price_ids', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(null=True), null=True, size=None)),
                ('cost_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('saved_femto', models.DecimalField(decimal_places=0, max_digits=38)),
                ('slice_id', models.BigIntegerField(null=True)),
                ('invoice_period', models.BigIntegerField()),
                ('made_at', models.DateTimeField()),
            ],
            options={
                'indexes': [models.Index(models.F('tenant_id'), models.OrderBy(models.F('admitted_at'), descending=True), name='adjustment_tenant_time'), models.Index(fields=['invoice_period', 'tenant_id'], name='adjustment_period'), models.Index(fields=['slice_id'], name='adjustment_slice')],
            },
        ),
        migrations.CreateModel(
            name='Correction',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('made_at', models.DateTimeField()),
                ('tenant_id', models.BigIntegerField()),
                ('window_id', models.BigIntegerField()),
                ('used', models.DecimalField(decimal_places=0, max_digits=38)),
                ('held', models.BigIntegerField()),
            ],
            options={
                'indexes': [models.Index(fields=['window_id'], name='correction_window')],
            },
        ),
        migrations.CreateModel(
            name='Slice',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant_id', models.BigIntegerField()),
                ('gateway_id', models.CharField(max_length=64)),
                ('fence', models.IntegerField(default=1)),
                ('windows', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None)),
                ('money', models.BigIntegerField()),
                ('tokens', models.BigIntegerField()),
                ('requests', models.BigIntegerField()),
                ('settled_money', models.DecimalField(decimal_places=0, default=0, help_text='femto-USD', max_digits=38)),
                ('settled_tokens', models.BigIntegerField(default=0)),
                ('settled_requests', models.BigIntegerField(default=0)),
                ('sealed', models.BooleanField()),
                ('open', models.BooleanField(default=True)),
                ('made_at', models.DateTimeField()),
                ('leased_until', models.DateTimeField()),
                ('reap_at', models.DateTimeField(help_text='no request admitted from it can still run')),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('open', True)), fields=['tenant_id'], name='slice_open_tenant'), models.Index(condition=models.Q(('open', True)), fields=['reap_at'], name='slice_open_reap'), models.Index(fields=['made_at'], name='slice_made')],
                'constraints': [models.CheckConstraint(condition=models.Q(('money__gte', 0), ('requests__gte', 0), ('settled_money__gte', 0), ('tokens__gte', 0), ('settled_requests__gte', 0), ('settled_tokens__gte', 0)), name='slice_counts')],
            },
        ),
        migrations.CreateModel(
            name='Window',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant_id', models.BigIntegerField()),
                ('budget_id', models.BigIntegerField()),
                ('unit', models.CharField(choices=[('money', 'Money'), ('tokens', 'Tokens'), ('requests', 'Requests')], max_length=8)),
                ('period_start', models.DateTimeField()),
                ('period_end', models.DateTimeField(help_text='None: it never ends', null=True)),
                ('carried', models.BigIntegerField(default=0, help_text='unused in the period before, added to the limit')),
                ('used', models.DecimalField(decimal_places=0, default=0, help_text='in millionths of the unit; of money that is femto-USD', max_digits=38)),
                ('held', models.BigIntegerField(default=0)),
                ('refused', models.BigIntegerField(default=0, help_text='requests that a dry-run budget would have refused')),
            ],
            options={
                'indexes': [models.Index(fields=['tenant_id', '-period_start'], name='window_tenant')],
                'constraints': [models.UniqueConstraint(fields=('budget_id', 'period_start'), name='window_once'), models.CheckConstraint(condition=models.Q(('carried__gte', 0), ('held__gte', 0), ('refused__gte', 0), ('used__gte', 0)), name='window_counts')],
            },
        ),
        *(
            operation
            for name in ('window', 'slice', 'adjustment', 'correction')
            for operation in (rls.operations(f"billing_{name}"), read_only(f"billing_{name}"))
        ),
        rls.append_only("billing_adjustment"),
        rls.append_only("billing_correction"),
        rls.system_only("billing_reconciliation"),
    ]
