"""Store how many draft tokens of an execution were accepted and rejected. Processes of the previous release write 0."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0015_metered_usage'),
    ]

    operations = [
        migrations.AddField('UsageEvent', 'accepted_drafts', models.IntegerField(db_default=0, help_text='draft tokens that became part of output')),
        migrations.AddField('UsageEvent', 'rejected_drafts', models.IntegerField(db_default=0, help_text='draft tokens that were verified in vain; not billed')),
    ]
