"""The end user, failures, retries and the experiment of a request."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('request_log', '0003_request_id_prefix'),
    ]

    operations = [
        migrations.AddField(
            model_name='requestrecord',
            name='end_user',
            field=models.CharField(db_default='', default='', help_text='`user` of the request', max_length=128),
        ),
        migrations.AddField(
            model_name='requestrecord',
            name='experiment_arm',
            field=models.SmallIntegerField(help_text='number of the assigned arm', null=True),
        ),
        migrations.AddField(
            model_name='requestrecord',
            name='experiment_id',
            field=models.BigIntegerField(null=True),
        ),
        migrations.AddField(
            model_name='requestrecord',
            name='experiment_unit',
            field=models.CharField(db_default='', default='', help_text='hash of the assigned unit', max_length=32),
        ),
        migrations.AddField(
            model_name='requestrecord',
            name='failure',
            field=models.CharField(db_default='', default='', help_text='of the answer: schema or tool', max_length=8),
        ),
        migrations.AddField(
            model_name='requestrecord',
            name='itl_us',
            field=models.IntegerField(help_text='mean time between tokens, in microseconds', null=True),
        ),
        migrations.AddField(
            model_name='requestrecord',
            name='retry_key',
            field=models.BigIntegerField(help_text='equal if the same end user sends the same prompt again', null=True),
        ),
    ]
