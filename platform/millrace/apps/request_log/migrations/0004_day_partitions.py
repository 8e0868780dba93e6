"""Partition the records of requests by UTC day, on live data.

The table becomes the first partition, without a copy. A constraint proves that it has no record of later days. It is
validated while records are written. Then only catalogs change, in one short transaction. If another transaction keeps
that one from its locks for `LOCK_TIMEOUT`, the migration fails, and can be run again at any time.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.db import migrations, transaction

from tenants.isolation import rls
from tenants.isolation.db_roles import SYSTEM
from tenants.migration_operations import SqlFiles

SQL = SqlFiles(__file__, tenant=rls.TENANT)
TABLE = "request_log_requestrecord"
LOCK_TIMEOUT = "SET LOCAL lock_timeout = '5s'"
FIRST_DAY, LAST_DAY = 2, 3  # from now: the table has all records of the days before
PRIVILEGES = (
    "REVOKE ALL ON FUNCTION request_log_create_days(date[]) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION request_log_drop_days(timestamptz) FROM PUBLIC",
    f"GRANT EXECUTE ON FUNCTION request_log_create_days(date[]) TO {SYSTEM}",
    f"GRANT EXECUTE ON FUNCTION request_log_drop_days(timestamptz) TO {SYSTEM}",
)
# The functions of triggers that read the records, and one of which reads only few partitions.
TRIGGERS = ("request_log_usage_changed_nearby", "request_log_feedback_changed")


def partition(apps: Any, schema_editor: Any) -> None:
    """Make the table the first partition of a partitioned one, and create the next days."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    first = today + timedelta(days=FIRST_DAY)
    alias = schema_editor.connection.alias
    bound = f"started_at < '{first.isoformat()}'"
    # NOTE: in a transaction before the last one. Writers of feedback lock its table first, and then read the records.
    with transaction.atomic(using=alias):
        _execute(schema_editor, LOCK_TIMEOUT)
        for name in TRIGGERS:
            _execute(schema_editor, SQL.read(name))
    with transaction.atomic(using=alias):
        _execute(schema_editor, LOCK_TIMEOUT)
        _execute(schema_editor, f"ALTER TABLE {TABLE} DROP CONSTRAINT IF EXISTS request_log_before")
        _execute(schema_editor, f"ALTER TABLE {TABLE} ADD CONSTRAINT request_log_before CHECK ({bound}) NOT VALID")
    with transaction.atomic(using=alias):
        _execute(schema_editor, f"SET LOCAL ROLE {SYSTEM}")
        _execute(schema_editor, f"DELETE FROM {TABLE} WHERE NOT {bound}")  # noqa: S608  (by a clock that is days off)
    with transaction.atomic(using=alias):
        _execute(schema_editor, f"ALTER TABLE {TABLE} VALIDATE CONSTRAINT request_log_before")
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT quote_ident(current_schema())")
        schema = cursor.fetchone()[0]
    with transaction.atomic(using=alias):
        _execute(schema_editor, LOCK_TIMEOUT)
        _execute(schema_editor, SQL.read("request_log_partition", first=first.isoformat()))
        for statement in rls.operations(TABLE).sql:
            _execute(schema_editor, str(statement))
        for name in ("request_log_create_days", "request_log_drop_days"):
            _execute(schema_editor, SQL.read(name, schema=schema))
        for statement in PRIVILEGES:
            _execute(schema_editor, statement)
        days = [(today + timedelta(days=day)).date() for day in range(FIRST_DAY, LAST_DAY + 1)]
        schema_editor.execute("SELECT request_log_create_days(%s)", [days])


def merge(apps: Any, schema_editor: Any) -> None:
    """Copy the records into one table, as the earlier release has it."""
    with transaction.atomic(using=schema_editor.connection.alias):
        for name in ("request_log_create_days(date[])", "request_log_drop_days(timestamptz)"):
            _execute(schema_editor, f"DROP FUNCTION {name}")
        _execute(schema_editor, SQL.read("request_log_merge"))
        for statement in rls.operations(TABLE).sql:
            _execute(schema_editor, str(statement))


def _execute(schema_editor: Any, statement: str) -> None:
    schema_editor.execute(statement, None)


class Migration(migrations.Migration):
    atomic = False

    dependencies: ClassVar = [
        ("request_log", "0003_request_id_index"),
        ("experiments", "0002_sql"),  # its trigger moves to the partitioned table
    ]

    operations: ClassVar = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunPython(partition, merge)],
            state_operations=[
                migrations.RemoveIndex("requestrecord", name)
                for name in ("request_log_request", "request_log_id_prefix", "request_log_started")
            ],
        ),
    ]
