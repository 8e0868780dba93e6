"""The daily budget of cache warming."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("tenants", "0013_tenant_semantic_cache"),
    ]

    operations = [
        migrations.AddField(
            model_name="tenant",
            name="cache_warming_nano",
            field=models.BigIntegerField(
                db_default=0,
                default=0,
                help_text="budget of cache warming for each day, in nano-USD; 0: caches are not warmed",
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("cache_warming_nano__range", (0, 10**15))),
                name="tenant_cache_warming_nano",
            ),
        ),
    ]
