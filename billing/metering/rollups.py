"""Sums of usage by hour and day, computed again for every hour with new settlements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connection

from billing.models import GROUPED, SUMMED, RollupState, UsageRollup
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

MARGIN = timedelta(seconds=5)  # recent settlements are left out, because they may not be committed yet
OVERLAP = timedelta(
    minutes=10
)  # hours with settlements in this time before the last run are computed again; no commit takes longer
_LOCK = 0x726F6C6C  # an arbitrary advisory lock, used only here

_COLUMNS = ", ".join((*GROUPED, *SUMMED))
_SUMS = ", ".join(f"sum({name})" for name in SUMMED)
# Rows with equal sums are not written again.
_KEPT = "SET {} WHERE ({}) IS DISTINCT FROM ({})".format(
    ", ".join(f"{name} = excluded.{name}" for name in SUMMED),
    ", ".join(f"billing_usagerollup.{name}" for name in SUMMED),
    ", ".join(f"excluded.{name}" for name in SUMMED),
)
_INTO = f"INSERT INTO billing_usagerollup (bucket, start, {_COLUMNS})"
# Rows of a tenant are written together, so that queries read few pages.
_UPSERT = f"""
GROUP BY 2, {", ".join(GROUPED)} ORDER BY tenant_id, 2
ON CONFLICT (tenant_id, bucket, start, {", ".join(GROUPED[1:])}) DO UPDATE {_KEPT}
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
_EMPTY = dict.fromkeys(("project_id", "key_id"), "0") | dict.fromkeys(("model", "tier", "miss_reason"), "''")


@dataclass(frozen=True)
class _Totals:
    """Sums of another bucket's rows, without some of its columns."""

    bucket: UsageRollup.Bucket
    of: UsageRollup.Bucket
    without: tuple[str, ...]
    start: str = "start"

    @property
    def statement(self) -> str:
        columns = ", ".join(_EMPTY[name] if name in self.without else name for name in GROUPED)
        groups = ", ".join(name for name in GROUPED if name not in self.without)
        return f"""
            {_INTO} SELECT '{self.bucket}', {self.start}, {columns}, {_SUMS} FROM billing_usagerollup
            WHERE bucket = '{self.of}' AND start >= %(start)s AND start < %(end)s
            GROUP BY 2, {groups} ORDER BY tenant_id, 2
            ON CONFLICT (tenant_id, bucket, start, {", ".join(GROUPED[1:])}) DO UPDATE {_KEPT}
        """  # noqa: S608  (names from above, nothing from outside)


_Bucket = UsageRollup.Bucket
_HOUR_TOTALS = _Totals(_Bucket.HOUR_TOTAL, _Bucket.HOUR, ("key_id",))
_DAY_TOTALS = _Totals(_Bucket.DAY_TOTAL, _Bucket.DAY, ("key_id",))
_KEY_DAYS = _Totals(_Bucket.KEY_DAY, _Bucket.DAY, ("model", "tier", "miss_reason"))
_MONTHS = _Totals(
    _Bucket.MONTH_TOTAL,
    _Bucket.DAY_TOTAL,
    ("project_id", "key_id", "tier", "miss_reason"),
    "date_trunc('month', start, 'UTC')",
)
_MONTH_COLUMNS = ", ".join(_EMPTY[name] if name in _MONTHS.without else name for name in GROUPED)
# The changes of months: the sums of a range of days, less the totals of these days, which the months include. It runs
# after the days were summed, and before their totals are.
_MONTH_CHANGES = f"""
{_INTO} SELECT '{_MONTHS.bucket}', {_MONTHS.start}, {_MONTH_COLUMNS}, {_SUMS}
FROM (
    SELECT start, tenant_id, model, {", ".join(SUMMED)} FROM billing_usagerollup
    WHERE bucket = '{_Bucket.DAY}' AND start >= %(start)s AND start < %(end)s
    UNION ALL
    SELECT start, tenant_id, model, {", ".join(f"-{name}" for name in SUMMED)} FROM billing_usagerollup
    WHERE bucket = '{_Bucket.DAY_TOTAL}' AND start >= %(start)s AND start < %(end)s
) changed
GROUP BY 2, tenant_id, model HAVING {" OR ".join(f"sum({name}) <> 0" for name in SUMMED)} ORDER BY tenant_id, 2
ON CONFLICT (tenant_id, bucket, start, {", ".join(GROUPED[1:])}) DO UPDATE
SET {", ".join(f"{name} = billing_usagerollup.{name} + excluded.{name}" for name in SUMMED)}
"""  # noqa: S608  (names from above, nothing from outside)
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
        # A process of an earlier version does not update all totals.
        done = [state.settled_before, state.totals_before, state.coarse_before] if state else []
        since = min((at for at in done if at), default=None)
        cursor.execute(_TOUCHED, {"before": before, "since": since and since - OVERLAP})
        is_full = _is_full_run(state, before)
        hours = [hour for (hour,) in cursor.fetchall()]
        days = sorted({hour.astimezone(UTC).replace(hour=0) for hour in hours})
        for start, end in _ranges(sorted(hours), timedelta(hours=1)):
            cursor.execute(_HOURS, {"start": start, "end": end, "before": before})
            cursor.execute(_HOUR_TOTALS.statement, {"start": start, "end": end})
        for start, end in _ranges(days, timedelta(days=1)):
            cursor.execute(_DAYS, {"start": start, "end": end})
            if not is_full:
                cursor.execute(_MONTH_CHANGES, {"start": start, "end": end})
            for totals in (_DAY_TOTALS, _KEY_DAYS):
                cursor.execute(totals.statement, {"start": start, "end": end})
        for month in sorted({day.replace(day=1) for day in days if is_full}):
            after = (month + timedelta(days=31)).replace(day=1)
            cursor.execute(_MONTHS.statement, {"start": month, "end": after})
        if state is not None and state.totals_before is None:
            for totals in (_HOUR_TOTALS, _DAY_TOTALS):
                cursor.execute(totals.statement, _ALL)
        if state is not None and state.coarse_before is None:
            for totals in (_KEY_DAYS, _MONTHS):
                cursor.execute(totals.statement, _ALL)
        progress = dict.fromkeys(("settled_before", "totals_before", "coarse_before"), before)
        RollupState.objects.update_or_create(pk=1, defaults=progress)
    return Built(before, len(hours))


def _is_full_run(state: RollupState | None, before: datetime) -> bool:
    """Return whether this run sums the changed months from all their days. Other runs add what has changed.

    The first run of a UTC day does it, so that no wrong sum lasts. A run that follows one of an earlier version does it
    too, since that one has changed the totals of days without their months.
    """
    if state is None or not state.settled_before == state.totals_before == state.coarse_before:
        return True
    return state.settled_before.astimezone(UTC).date() != before.astimezone(UTC).date()


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
