"""Sums of usage by hour and day, computed again for every hour with new settlements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection

from billing.models import GROUPED, SUMMED, RollupState
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

MARGIN = timedelta(seconds=5)  # recent settlements are left out, because they may not be committed yet
OVERLAP = timedelta(
    minutes=10
)  # hours with settlements in this time before the last run are computed again; no commit takes longer
_LOCK = 0x726F6C6C  # an arbitrary advisory lock, used only here

_COLUMNS = ", ".join((*GROUPED, *SUMMED))
_SUMS = ", ".join(f"sum({name})" for name in SUMMED)
_KEPT = ", ".join(f"{name} = excluded.{name}" for name in SUMMED)
_INTO = f"INSERT INTO billing_usagerollup (bucket, start, {_COLUMNS})"
_UPSERT = f"""
GROUP BY 2, {", ".join(GROUPED)}
ON CONFLICT (tenant_id, bucket, start, {", ".join(GROUPED[1:])}) DO UPDATE SET {_KEPT}
"""
_TOUCHED = """
SELECT DISTINCT date_trunc('hour', admitted_at, 'UTC') FROM billing_usagechange
WHERE settled_at < %(before)s AND (%(since)s::timestamptz IS NULL OR settled_at >= %(since)s)
"""
# NOTE: one statement per range, with constant bounds. A join with the ranges would read all events for each.
_HOURS = f"""
{_INTO} SELECT 'hour', date_trunc('hour', admitted_at, 'UTC'), {", ".join(GROUPED)}, {_SUMS}
FROM billing_usagechange
WHERE admitted_at >= %(start)s AND admitted_at < %(end)s AND settled_at < %(before)s {_UPSERT}
"""  # noqa: S608  (column names from above, nothing from outside)
_DAYS = f"""
{_INTO} SELECT 'day', date_trunc('day', start, 'UTC'), {", ".join(GROUPED)}, {_SUMS}
FROM billing_usagerollup
WHERE bucket = 'hour' AND start >= %(start)s AND start < %(end)s {_UPSERT}
"""  # noqa: S608
_BY_KEY = [name for name in GROUPED if name != "key_id"]
_TOTALS = f"""
{_INTO} SELECT %(bucket)s, start, {", ".join("0" if name == "key_id" else name for name in GROUPED)}, {_SUMS}
FROM billing_usagerollup
WHERE bucket = %(of)s AND start >= %(start)s AND start < %(end)s
GROUP BY 2, {", ".join(_BY_KEY)}
ON CONFLICT (tenant_id, bucket, start, {", ".join(GROUPED[1:])}) DO UPDATE SET {_KEPT}
"""  # noqa: S608
_BUCKETS: tuple[dict[str, Any], ...] = ({"bucket": "hours", "of": "hour"}, {"bucket": "days", "of": "day"})
_ALL = {"start": datetime(1970, 1, 1, tzinfo=UTC), "end": datetime(2200, 1, 1, tzinfo=UTC)}


@dataclass(frozen=True)
class Built:
    """The result of a run."""

    settled_before: datetime
    hours: int


def build() -> Built:
    """Update the rollups. Safe to call at any time, from any number of processes, and after a crash."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        cursor.execute("SELECT clock_timestamp()")
        before = cursor.fetchone()[0] - MARGIN
        state = RollupState.objects.first()
        # A process of the version before the totals does not update them.
        done = [at for at in (state and state.settled_before, state and state.totals_before) if at]
        since = min(done) - OVERLAP if done else None
        cursor.execute(_TOUCHED, {"before": before, "since": since})
        hours = [hour for (hour,) in cursor.fetchall()]
        days = sorted({hour.astimezone(UTC).replace(hour=0) for hour in hours})
        for statement, totals, starts, length in (
            (_HOURS, _BUCKETS[0], sorted(hours), timedelta(hours=1)),
            (_DAYS, _BUCKETS[1], days, timedelta(days=1)),
        ):
            for start, end in _ranges(starts, length):
                cursor.execute(statement, {"start": start, "end": end, "before": before})
                cursor.execute(_TOTALS, {"start": start, "end": end, **totals})
        if state is not None and state.totals_before is None:
            for totals in _BUCKETS:
                cursor.execute(_TOTALS, _ALL | totals)
        RollupState.objects.update_or_create(pk=1, defaults={"settled_before": before, "totals_before": before})
    return Built(before, len(hours))


def _ranges(starts: Iterable[datetime], length: timedelta) -> Iterator[tuple[datetime, datetime]]:
    """Yield half-open ranges that start at `starts`, with adjacent ones joined."""
    first = end = None
    for start in starts:
        if start != end:
            if first is not None and end is not None:
                yield first, end
            first = start
        end = start + length
    if first is not None and end is not None:
        yield first, end
