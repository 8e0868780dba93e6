"""Whether unknown fields of a tenant's requests are rejected."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0002_row_level_security'),
    ]

    operations = [
        migrations.AddField(
            model_name='tenant',
            name='unknown_parameters',
            field=models.CharField(choices=[('default', "platform's default"), ('reject', 'Reject'), ('warn', 'Warn')], db_default='default', default='default', help_text='whether unknown fields of requests are rejected, or dropped and named', max_length=10),
        ),
        migrations.AddConstraint(
            model_name='tenant',
            constraint=models.CheckConstraint(condition=models.Q(('unknown_parameters__in', ['default', 'reject', 'warn'])), name='tenant_unknown_parameters'),
        ),
    ]
