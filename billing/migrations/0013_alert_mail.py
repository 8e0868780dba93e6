"""Which mail told of an alert."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0012_alerts'),
        ('tenants', '0002_row_level_security'),
    ]

    operations = [
        migrations.AddField(
            model_name='budgetalert',
            name='mail',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to='tenants.outboxemail'),
        ),
    ]
