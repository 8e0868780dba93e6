"""Budgets."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0007_rollups'),
        ('tenants', '0002_row_level_security'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='Budget',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100)),
                ('unit', models.CharField(choices=[('money', 'Money'), ('tokens', 'Tokens'), ('requests', 'Requests')], max_length=8)),
                ('period', models.CharField(choices=[('day', 'Day'), ('month', 'Month'), ('lifetime', 'Lifetime')], max_length=8)),
                ('amount', models.BigIntegerField()),
                ('mode', models.CharField(choices=[('hard', 'Hard'), ('soft', 'Soft'), ('dry_run', 'Dry Run')], default='hard', max_length=8)),
                ('clamp', models.BooleanField(default=False, help_text='shorten answers that are too dear, rather than refuse them')),
                ('raise_amount', models.BigIntegerField(default=0)),
                ('raise_until', models.DateTimeField(null=True)),
                ('rollover_cap', models.BigIntegerField(default=0, help_text='how much unused amount a period takes over at most')),
                ('active', models.BooleanField(default=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('key', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='tenants.apikey')),
                ('member', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL)),
                ('project', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='tenants.project')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('amount__range', (0, 100000000000000000)), ('raise_amount__range', (0, 100000000000000000)), ('rollover_cap__range', (0, 100000000000000000))), name='budget_amounts'), models.CheckConstraint(condition=models.Q(models.Q(('key__isnull', True), ('project__isnull', True)), models.Q(('member__isnull', True), ('project__isnull', True)), models.Q(('key__isnull', True), ('member__isnull', True)), _connector='OR'), name='budget_scope')],
            },
        ),
        rls.operations("billing_budget"),
    ]
