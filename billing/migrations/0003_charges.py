# NOTE: reversed only while no usage was reversed without a document and no metered usage was reversed.

import django.db.models.deletion
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0002_sql'),
        ('tenants', '0002_sql'),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name='meteredusage',
            name='metered_usage_amounts',
        ),
        migrations.AddField(
            model_name='meteredusage',
            name='reverses',
            field=models.OneToOneField(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='reversal', to='billing.meteredusage'),
        ),
        migrations.AddField(
            model_name='rerating',
            name='has_metered',
            field=models.BooleanField(db_default=False, default=True, help_text='whether it corrects metered usage; False: an earlier release drafted it'),
        ),
        migrations.AlterField(
            model_name='reratedinvoice',
            name='rerating',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='invoices', to='billing.rerating'),
        ),
        migrations.AddConstraint(
            model_name='meteredusage',
            constraint=models.UniqueConstraint(fields=('id', 'tenant'), name='metered_usage_of_tenant'),
        ),
        migrations.AddConstraint(
            model_name='meteredusage',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('amount__gt', 0), ('cost_femto__gte', 0), ('ended_at__gte', models.F('started_at')), ('reverses', None)), models.Q(('amount__lt', 0), ('cost_femto__lte', 0), ('reverses__isnull', False)), _connector='OR'), name='metered_usage_amounts'),
        ),
        migrations.AddConstraint(
            model_name='reratedinvoice',
            constraint=models.UniqueConstraint(condition=models.Q(('rerating', None)), fields=('invoice', 'closed_periods'), name='absorbed_reversal_once'),
        ),
        migrations.AddConstraint(
            model_name='reratedinvoice',
            constraint=models.CheckConstraint(condition=models.Q(('rerating__isnull', False), ('note', None), _connector='OR'), name='absorbed_reversal_without_note'),
        ),
        rls.same_tenant("billing_meteredusage", "reverses_id", "billing_meteredusage"),
    ]
