"""The cache layer of each request, and the request whose answer was returned."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('request_log', '0004_success_signals'),
    ]

    operations = [
        migrations.AddField(
            model_name='requestrecord',
            name='cache_layer',
            field=models.CharField(db_default='', default='', help_text='origin of the answer; empty: no usage is known', max_length=16),
        ),
        migrations.AddField(
            model_name='requestrecord',
            name='cache_source',
            field=models.CharField(db_default='', default='', help_text='the request whose cached or concurrent answer was returned', max_length=64),
        ),
    ]
