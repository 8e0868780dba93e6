"""Sums of usage by hour and day, made anew from the events for every hour that something was settled in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection

from billing.models import GROUPED, SUMMED, RollupState
from tenants.roles import SystemUse
from tenants.scoping import system

MARGIN = timedelta(seconds=5)  # what was settled so lately is not in the rollups yet: it may not have committed
OVERLAP = timedelta(minutes=10)  # hours touched so long before the last run are made again: no commit takes longer
_LOCK = 0x726F6C6C  # any number that is nobody else's advisory lock

_COLUMNS = ", ".join((*GROUPED, *SUMMED))
_SUMS = ", ".join(f"sum({name})" for name in SUMMED)
_KEPT = ", ".join(f"{name} = excluded.{name}" for name in SUMMED)
_INTO = f"INSERT INTO billing_usagerollup (bucket, start, {_COLUMNS})"
_UPSERT = f"""
GROUP BY dirty.start, {", ".join(GROUPED)}
ON CONFLICT (tenant_id, bucket, start, {", ".join(GROUPED[1:])}) DO UPDATE SET {_KEPT}
"""
_TOUCHED = """
SELECT DISTINCT date_trunc('hour', admitted_at, 'UTC') FROM billing_usagechange
WHERE settled_at < %(before)s AND (%(since)s::timestamptz IS NULL OR settled_at >= %(since)s)
"""
_HOURS = f"""
{_INTO} SELECT 'hour', dirty.start, {", ".join(GROUPED)}, {_SUMS}
FROM unnest(%(hours)s::timestamptz[]) AS dirty (start)
JOIN billing_usagechange used ON used.admitted_at >= dirty.start AND used.admitted_at < dirty.start + interval '1 hour'
WHERE used.settled_at < %(before)s {_UPSERT}
"""  # noqa: S608  (column names from above, nothing from outside)
_DAYS = f"""
{_INTO} SELECT 'day', dirty.start, {", ".join(GROUPED)}, {_SUMS}
FROM (SELECT DISTINCT date_trunc('day', hour, 'UTC') FROM unnest(%(hours)s::timestamptz[]) AS hour) AS dirty (start)
JOIN billing_usagerollup used ON used.bucket = 'hour' AND used.start >= dirty.start
    AND used.start < dirty.start + interval '24 hours'
{_UPSERT}
"""  # noqa: S608


@dataclass(frozen=True)
class Built:
    """What a run did."""

    settled_before: datetime
    hours: int


def build() -> Built:
    """Bring the rollups up to now. Safe to call at any time, from any number of processes, and after any crash."""
    with system(SystemUse.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        cursor.execute("SELECT clock_timestamp()")
        before = cursor.fetchone()[0] - MARGIN
        state = RollupState.objects.first()
        since = None if state is None else state.settled_before - OVERLAP
        cursor.execute(_TOUCHED, {"before": before, "since": since})
        hours = [hour for (hour,) in cursor.fetchall()]
        for statement in (_HOURS, _DAYS):
            cursor.execute(statement, {"before": before, "hours": hours})
        RollupState.objects.update_or_create(pk=1, defaults={"settled_before": before})
    return Built(before, len(hours))
