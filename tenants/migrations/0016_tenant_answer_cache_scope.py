"""The setting of which keys share cached answers."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("tenants", "0015_verified_email_addresses"),
    ]

    operations = [
        migrations.AddField(
            model_name="tenant",
            name="answer_cache_scope",
            field=models.CharField(
                choices=[("tenant", "all projects"), ("project", "keys of the same project")],
                db_default="tenant",
                default="tenant",
                help_text="whether cached answers are shared by all projects, or only by the keys of a project",
                max_length=10,
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("answer_cache_scope__in", ["tenant", "project"])), name="tenant_answer_cache_scope"
            ),
        ),
    ]
