"""Thresholds of budgets, and the alerts they led to."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models

import billing.models.budgets
from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0011_rollover'),
        ('tenants', '0002_row_level_security'),
    ]

    operations = [
        migrations.AddField(
            model_name='budget',
            name='thresholds',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.SmallIntegerField(), blank=True, default=billing.models.budgets.usual_thresholds, help_text='in percent', size=None),
        ),
        migrations.AddField(
            model_name='budget',
            name='alert_forecast',
            field=models.BooleanField(default=True, help_text='alert when the forecast passes the limit'),
        ),
        migrations.AddIndex(
            model_name='window',
            index=models.Index(fields=['period_end'], name='window_end'),
        ),
        migrations.CreateModel(
            name='BudgetAlert',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('threshold', models.CharField(help_text='percent, or `forecast`', max_length=8)),
                ('used', models.BigIntegerField()),
                ('limit', models.BigIntegerField()),
                ('forecast', models.BigIntegerField(help_text="expected by the period's end; of alerts by forecast alone", null=True)),
                ('at', models.DateTimeField(auto_now_add=True)),
                ('budget', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='billing.budget')),
                ('event', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to='tenants.webhookevent')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='tenants.tenant')),
                ('window', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='billing.window')),
            ],
            options={
                'indexes': [models.Index(fields=['budget', '-id'], name='budget_alert_budget')],
                'constraints': [models.UniqueConstraint(fields=('window', 'threshold'), name='budget_alert_once')],
            },
        ),
        rls.operations("billing_budgetalert"),
    ]
