"""Monthly partitions of the usage table: created ahead of time, by the first process that runs."""

from __future__ import annotations

from datetime import UTC, date, datetime

from django.db import connection

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

TABLE = "billing_usageevent"
MONTHS_BEHIND = 1
MONTHS_AHEAD = 3


def month_of(moment: datetime) -> date:
    """Return the first day of the UTC month of `moment`."""
    return moment.astimezone(UTC).date().replace(day=1)


def shift_month(month: date, months: int) -> date:
    """Return the first day of the month that is `months` later."""
    years, index = divmod(month.year * 12 + month.month - 1 + months, 12)
    return date(years, index + 1, 1)


def partition_name(month: date) -> str:
    return f"{TABLE}_{month:%Y_%m}"


def ensure_partitions(now: datetime | None = None) -> list[str]:
    """Create the missing partitions of the last, the current and the next three months. Return their names.

    Safe to call at any time, from any number of processes. It does not block inserts.
    """
    current = month_of(now or datetime.now(UTC))
    wanted = [shift_month(current, offset) for offset in range(-MONTHS_BEHIND, MONTHS_AHEAD + 1)]
    if not _find_missing(wanted):
        return []
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        # The function runs as the tables' owner, because no other role may change tables.
        cursor.execute("SELECT billing_create_partitions(%s)", [wanted])
        return list(cursor.fetchone()[0])


def existing_partitions(table: str = TABLE) -> list[str]:
    """Return the names of a table's partitions, oldest first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
            " WHERE i.inhparent = to_regclass(%s) ORDER BY c.relname",
            [table],
        )
        return [name for (name,) in cursor.fetchall()]


def _find_missing(months: list[date]) -> list[date]:
    have = set(existing_partitions())
    return [month for month in months if partition_name(month) not in have]
