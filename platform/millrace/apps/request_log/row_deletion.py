"""Deletion of many rows, in short transactions."""

from __future__ import annotations

from datetime import datetime

from django.db import connection

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

DELETE_BATCH_SIZE = 5_000  # rows, to keep transactions short


def delete_rows(statement: str, now: datetime, before: datetime) -> int:
    """Run a statement that deletes up to %(most)s rows until none is left. Return the number of deleted rows."""
    removed = 0
    while True:
        with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
            cursor.execute(statement, {"before": before, "now": now, "most": DELETE_BATCH_SIZE})
            count = int(cursor.rowcount)
        removed += count
        if count < DELETE_BATCH_SIZE:
            return removed
