"""Remember the deployments of MILLRACE_MODELS that operators removed, so that no start adds them again."""

from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0006_deployment_draft_model'),
    ]

    operations = [
        migrations.CreateModel(
            name='RemovedDeployment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=64, unique=True)),
                ('imported', models.JSONField(help_text='what MILLRACE_MODELS said when it was last imported')),
            ],
        ),
        rls.system_only('operations_removeddeployment'),
        migrations.RunSQL(
            [f'REVOKE ALL ON operations_removeddeployment FROM {APP}'],
            [f'GRANT SELECT, INSERT, UPDATE, DELETE ON operations_removeddeployment TO {APP}'],
        ),
    ]
