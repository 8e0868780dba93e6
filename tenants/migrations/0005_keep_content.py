"""How long a tenant's prompts and answers are kept."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0004_rehash'),
    ]

    operations = [
        migrations.AddField(
            model_name='tenant',
            name='keep_content_days',
            field=models.SmallIntegerField(default=0, help_text='how long prompts and answers are kept; 0: not'),
        ),
        migrations.AddConstraint(
            model_name='tenant',
            constraint=models.CheckConstraint(condition=models.Q(('keep_content_days__range', (0, 90))), name='tenant_content_days'),
        ),
    ]
