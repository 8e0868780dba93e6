from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("operations", "0004_sampling_defaults"),
    ]

    operations = [
        migrations.AddField(
            model_name='deployment',
            name='truncate_inputs',
            field=models.BooleanField(db_default=True, default=True, help_text="whether inputs above an encoder's length are truncated, or refused"),
        ),
    ]
