"""Monthly partitions of the usage table: made ahead of time, by whoever comes first."""

from __future__ import annotations

from datetime import UTC, date, datetime

from django.db import connection, transaction

TABLE = "billing_usageevent"
MONTHS_BEHIND = 1
MONTHS_AHEAD = 3
_LOCK = 0x6D72_7061_7274  # any number that is ours alone: "mrpart"


def month_of(moment: datetime) -> date:
    """The first day of the UTC month that `moment` lies in."""
    return moment.astimezone(UTC).date().replace(day=1)


def shifted(month: date, months: int) -> date:
    """The first day of the month so many months later."""
    years, index = divmod(month.year * 12 + month.month - 1 + months, 12)
    return date(years, index + 1, 1)


def partition_name(month: date) -> str:
    return f"{TABLE}_{month:%Y_%m}"


def ensure_partitions(now: datetime | None = None) -> list[str]:
    """Make the partitions of last month, this month and the next three that are missing; returns their names.

    Safe to call at any time, from any number of processes at once. Inserts into the table go on meanwhile.
    """
    current = month_of(now or datetime.now(UTC))
    wanted = [shifted(current, offset) for offset in range(-MONTHS_BEHIND, MONTHS_AHEAD + 1)]
    if not _missing(wanted):
        return []
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        made = _missing(wanted)  # again: another may have made them while we waited
        for month in made:
            for statement in _statements(month):
                cursor.execute(statement)
    return [partition_name(month) for month in made]


def existing_partitions() -> list[str]:
    """Names of the table's partitions, oldest first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
            " WHERE i.inhparent = to_regclass(%s) ORDER BY c.relname",
            [TABLE],
        )
        return [name for (name,) in cursor.fetchall()]


def _missing(months: list[date]) -> list[date]:
    have = set(existing_partitions())
    return [month for month in months if partition_name(month) not in have]


def _statements(month: date) -> list[str]:
    """Make the month's table beside the parent and attach it: unlike CREATE … PARTITION OF this blocks no inserts.

    Row triggers come with attaching; one against TRUNCATE does not, so each partition gets its own. The names and
    bounds hold nothing but digits of a date.
    """
    name, start, end = partition_name(month), month.isoformat(), shifted(month, 1).isoformat()
    return [
        f"CREATE TABLE {name} (LIKE {TABLE} INCLUDING ALL)",
        f"ALTER TABLE {TABLE} ATTACH PARTITION {name} FOR VALUES FROM ('{start} 00:00:00+00') TO ('{end} 00:00:00+00')",
        f"CREATE TRIGGER billing_usage_no_truncate BEFORE TRUNCATE ON {name}"
        " FOR EACH STATEMENT EXECUTE FUNCTION billing_refuse_truncate()",
    ]
