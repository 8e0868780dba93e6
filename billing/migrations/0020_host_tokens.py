"""Store how many prompt tokens of an execution were restored from CPU memory. Earlier processes write 0."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0019_searches_and_credit_times'),
    ]

    operations = [
        migrations.AddField('UsageEvent', 'host_tokens', models.IntegerField(db_default=0, help_text='part of cache_read that was restored from CPU memory')),
    ]
