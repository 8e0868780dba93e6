"""The request fields that were accepted without effect."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('request_log', '0001_initial'),
    ]

    operations = [
        migrations.AddField(
            model_name='requestrecord',
            name='ignored',
            field=models.JSONField(db_default=models.Value([], models.JSONField()), default=list, help_text='request fields that were accepted without effect'),
        ),
    ]
