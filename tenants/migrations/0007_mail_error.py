"""Why a mail could not be sent."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0006_webhooks'),
    ]

    operations = [
        migrations.AddField(
            model_name='mail',
            name='error',
            field=models.CharField(blank=True, db_default='', default='', help_text='why the last try failed', max_length=200),
        ),
    ]
