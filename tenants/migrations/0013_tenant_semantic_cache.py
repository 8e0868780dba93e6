"""The maximum error rate of answers to similar questions."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("tenants", "0012_console"),
    ]

    operations = [
        migrations.AddField(
            model_name="tenant",
            name="semantic_cache_max_error_percent",
            field=models.SmallIntegerField(
                db_default=0,
                default=0,
                help_text="maximum error rate of answers to similar questions; 0: none are served",
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("semantic_cache_max_error_percent__range", (0, 20))),
                name="tenant_semantic_cache_max_error",
            ),
        ),
    ]
