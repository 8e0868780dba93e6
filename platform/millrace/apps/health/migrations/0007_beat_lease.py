"""Create the lease of the active beat."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

from tenants.isolation import rls
from tenants.migration_operations import combine


class Migration(migrations.Migration):
    dependencies: ClassVar = [("operations", "0006_stored_texts")]

    operations: ClassVar = [
        migrations.CreateModel(
            name="BeatLease",
            fields=[
                ("id", models.SmallIntegerField(primary_key=True, serialize=False)),
                ("holder", models.CharField(help_text="host and process", max_length=128)),
                (
                    "place",
                    models.CharField(help_text="the lock file that the holder has locked", max_length=64, null=True),
                ),
                (
                    "fencing_number",
                    models.BigIntegerField(help_text="increases each time that a beat takes the lease"),
                ),
                ("expires_at", models.DateTimeField()),
                (
                    "last_runs",
                    models.JSONField(default=dict, help_text="name of each entry -> when its task was sent last"),
                ),
            ],
            options={
                "constraints": [models.CheckConstraint(condition=models.Q(("id", 1)), name="beat_lease_single_row")]
            },
        ),
        combine(rls.system_only("operations_beatlease"), rls.revoke("ALL", "operations_beatlease")),
    ]
