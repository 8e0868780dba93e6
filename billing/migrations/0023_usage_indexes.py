"""Indexes of usage events: prompts that differ from a cached one, for the prompt advisor, and times of settlement.

They are built without blocking writes: first in each partition, then attached to that of the table. If this is
interrupted, the next run continues.
"""

from typing import Any

import django.contrib.postgres.indexes
from django.db import migrations, models

_INDEXES = {
    "billing_usage_prefix_changed": "(tenant_id, admitted_at DESC) WHERE miss_reason = 'prefix_changed'",
    "billing_usage_settled_at": "USING brin (settled_at) WITH (pages_per_range = 16, autosummarize = on)",
}
_FORMER = {"billing_usage_settled": "USING brin (settled_at)"}
_PARTITIONS = """
SELECT c.relname, EXISTS (
    SELECT FROM pg_inherits x JOIN pg_index i ON i.indexrelid = x.inhrelid
    WHERE x.inhparent = to_regclass(%s) AND i.indrelid = c.oid
) FROM pg_inherits p JOIN pg_class c ON c.oid = p.inhrelid WHERE p.inhparent = 'billing_usageevent'::regclass
"""


def create(apps: Any, schema_editor: Any) -> None:
    _replace(schema_editor, _FORMER, _INDEXES)


def drop(apps: Any, schema_editor: Any) -> None:
    _replace(schema_editor, _INDEXES, _FORMER)


def _replace(schema_editor: Any, old: dict[str, str], new: dict[str, str]) -> None:
    for name, definition in new.items():
        schema_editor.execute(f"CREATE INDEX IF NOT EXISTS {name} ON ONLY billing_usageevent {definition}")
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(_PARTITIONS, [name])
            missing = [partition for partition, is_attached in cursor.fetchall() if not is_attached]
        for partition in missing:
            index = f"{partition}_{name.removeprefix('billing_usage_')}"
            schema_editor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index}")  # invalid after an interruption
            schema_editor.execute(f"CREATE INDEX CONCURRENTLY {index} ON {partition} {definition}")
            schema_editor.execute(f"ALTER INDEX {name} ATTACH PARTITION {index}")
    for name in old:
        schema_editor.execute(f"DROP INDEX IF EXISTS {name}")


class Migration(migrations.Migration):
    atomic = False

    dependencies = [
        ("billing", "0022_coarse_rollups"),
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
                        name="billing_usage_prefix_changed",
                    ),
                ),
                migrations.RemoveIndex("usageevent", "billing_usage_settled"),
                migrations.AddIndex(
                    "usageevent",
                    django.contrib.postgres.indexes.BrinIndex(
                        models.F("settled_at"), autosummarize=True, name="billing_usage_settled_at", pages_per_range=16
                    ),
                ),
            ],
        ),
    ]
