"""The generation of a user's sessions, to which they are bound as to the password."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0007_mail_error'),
    ]

    operations = [
        migrations.AddField(
            model_name='user',
            name='session_generation',
            field=models.PositiveIntegerField(db_default=0, default=0),
        ),
    ]
