"""Databases that were migrated before the reset of the migrations.

The earlier migrations ended with the same schema. A database at their end is taken over by replacing their rows of
`django_migrations`. A database that has only some of them is refused.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from django.db import transaction

BRIDGE = "ed940730714a"  # the last commit with the earlier migrations; docs/guides/upgrade.md names it too
FIRST = ("tenants", "0001_initial")  # the first of the earlier migrations; all others depend on it
LAST = {
    "tenants": "0017_tenant_jobs",
    "billing": "0025_invoice_run_failures",
    "batches": "0003_internal_batches",
    "feedback": "0001_initial",
    "request_log": "0013_internal_batches",
    "experiments": "0001_initial",
    "operations": "0007_removed_deployment",
    "alerts": "0001_initial",
}
REPLACEMENTS = ("0001_schema", "0002_sql")  # migrations of each app


def take_over(connection: Any) -> None:
    """Replace the earlier migrations in `django_migrations`, in one transaction. Changes no other database.

    Raises:
        CommandError: the database has only some of the earlier migrations. The message says what to do.
    """
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass('django_migrations')")
        if cursor.fetchone()[0] is None:
            return
        cursor.execute("LOCK TABLE django_migrations IN SHARE ROW EXCLUSIVE MODE")  # one process takes over
        cursor.execute("SELECT app, name FROM django_migrations WHERE app = ANY(%s)", [list(LAST)])
        applied = set(cursor.fetchall())
        if FIRST not in applied:
            return
        if missing := sorted(set(LAST.items()) - applied):
            raise CommandError(
                f"This database has only a part of the migrations before their reset: {' '.join(missing[0])} is not"
                f" applied. Migrate it with commit {BRIDGE} first, then with this version (docs/guides/upgrade.md)."
            )
        cursor.execute("DELETE FROM django_migrations WHERE app = ANY(%s)", [list(LAST)])
        rows = [(app, name) for name in REPLACEMENTS for app in LAST]
        cursor.executemany("INSERT INTO django_migrations (app, name, applied) VALUES (%s, %s, now())", rows)
