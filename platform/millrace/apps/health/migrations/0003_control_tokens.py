from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0002_sql'),
    ]

    operations = [
        migrations.AddField(
            model_name='deployment',
            name='control_tokens',
            field=models.CharField(db_default='template', default='template', help_text='where texts become control tokens: template or anywhere', max_length=8),
        ),
    ]
