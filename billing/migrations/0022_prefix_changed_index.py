"""An index of the executions whose prompt differs from a cached one, for the prompt advisor.

It is built without blocking writes: first in each partition, then attached to that of the table. If it is interrupted,
the next run continues.
"""

from typing import Any

from django.db import migrations, models

NAME = "billing_usage_prefix_changed"
_INDEX = "billing_usageevent (tenant_id, admitted_at DESC) WHERE miss_reason = 'prefix_changed'"
_PARTITIONS = """
SELECT c.relname, EXISTS (
    SELECT FROM pg_inherits x JOIN pg_index i ON i.indexrelid = x.inhrelid
    WHERE x.inhparent = to_regclass(%s) AND i.indrelid = c.oid
) FROM pg_inherits p JOIN pg_class c ON c.oid = p.inhrelid WHERE p.inhparent = 'billing_usageevent'::regclass
"""


def create(apps: Any, schema_editor: Any) -> None:
    schema_editor.execute(f"CREATE INDEX IF NOT EXISTS {NAME} ON ONLY {_INDEX}")
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(_PARTITIONS, [NAME])
        missing = [partition for partition, is_attached in cursor.fetchall() if not is_attached]
    for partition in missing:
        index = f"{partition}_prefix_changed"
        schema_editor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index}")  # invalid, if its creation was interrupted
        statement = f"CREATE INDEX CONCURRENTLY {index} ON {_INDEX}"
        schema_editor.execute(statement.replace("billing_usageevent (", f"{partition} ("))
        schema_editor.execute(f"ALTER INDEX {NAME} ATTACH PARTITION {index}")


def drop(apps: Any, schema_editor: Any) -> None:
    schema_editor.execute(f"DROP INDEX {NAME}")


class Migration(migrations.Migration):
    atomic = False

    dependencies = [
        ("billing", "0021_rollup_totals"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            [migrations.RunPython(create, drop)],
            [
                migrations.AddIndex(
                    "usageevent",
                    models.Index(
                        models.F("tenant_id"),
                        models.OrderBy(models.F("admitted_at"), descending=True),
                        condition=models.Q(("miss_reason", "prefix_changed")),
                        name=NAME,
                    ),
                )
            ],
        ),
    ]
