"""Sums of usage by end user and UTC day, computed again for every day with new settlements.

They are beside the rollups of `billing.metering.rollups`, which have no end users. Of each key and day, only
`MAX_END_USERS` end users have rows, those with the highest cost. All others together have rows without an end user.
The totals of all keys are sums of these rows.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection

from billing.metering.rollups import MARGIN, OVERLAP
from billing.models import SUMMED, EndUserRollup, RollupState, UsageRollup
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

MAX_END_USERS = 1000  # end users of one key and day
FIRST_RUN = timedelta(days=1)  # the first run computes the days with settlements in this time before it
_LOCK = 0x656E6475  # an arbitrary advisory lock, used only here
_TABLE = EndUserRollup._meta.db_table
_GROUPED = ("tenant_id", "key_id", "project_id", "model", "end_user")
_GROUPS, _COLUMNS = ", ".join(_GROUPED), ", ".join(SUMMED)
_SUMS = ", ".join(f"sum({name}) AS {name}" for name in SUMMED)
_UNIQUE = "tenant_id, start, key_id, project_id, model, end_user"
# Rows with equal sums are not written again.
_UPSERT = "ON CONFLICT ({}) DO UPDATE SET {} WHERE ({}) IS DISTINCT FROM ({})".format(
    _UNIQUE,
    ", ".join(f"{name} = excluded.{name}" for name in SUMMED),
    ", ".join(f"{_TABLE}.{name}" for name in SUMMED),
    ", ".join(f"excluded.{name}" for name in SUMMED),
)
_TOUCHED = """
SELECT DISTINCT date_trunc('day', admitted_at, 'UTC') FROM billing_usagechange
WHERE settled_at < %(before)s AND settled_at >= %(since)s
"""
# The days before the first run, whose usage has no end users.
_OLDER = f"""
INSERT INTO {_TABLE} (start, {_GROUPS}, {_COLUMNS})
SELECT start, tenant_id, key_id, project_id, model, '', {_SUMS} FROM {UsageRollup._meta.db_table}
WHERE bucket IN ('day', 'days') GROUP BY start, tenant_id, key_id, project_id, model {_UPSERT}
"""  # noqa: S608  (names from above, nothing from outside)
_DAY = f"""
WITH summed AS (
    SELECT {_GROUPS}, {_SUMS} FROM billing_usagechange
    WHERE admitted_at >= %(start)s AND admitted_at < %(end)s AND settled_at < %(before)s GROUP BY {_GROUPS}
), ranked AS (
    SELECT tenant_id, key_id, end_user, row_number() OVER (
        PARTITION BY tenant_id, key_id
        ORDER BY sum(cost_femto) DESC, sum(completed + cancelled + failed) DESC, end_user
    ) AS place
    FROM summed WHERE end_user <> '' GROUP BY tenant_id, key_id, end_user
), named AS (
    SELECT tenant_id, key_id, project_id, model, {_COLUMNS},
        CASE WHEN end_user = '' OR place <= %(most)s THEN end_user END AS end_user
    FROM summed LEFT JOIN ranked USING (tenant_id, key_id, end_user)
), by_key AS (
    SELECT {_GROUPS}, {_SUMS} FROM named GROUP BY {_GROUPS}
), bounded AS (
    SELECT * FROM by_key
    UNION ALL SELECT tenant_id, 0, project_id, model, end_user, {_SUMS} FROM by_key
    GROUP BY tenant_id, project_id, model, end_user
), gone AS (
    DELETE FROM {_TABLE} r WHERE r.start = %(start)s AND NOT EXISTS (
        SELECT FROM bounded b WHERE (b.tenant_id, b.key_id, b.project_id, b.model)
            = (r.tenant_id, r.key_id, r.project_id, r.model) AND b.end_user IS NOT DISTINCT FROM r.end_user
    )
)
INSERT INTO {_TABLE} (start, {_GROUPS}, {_COLUMNS})
SELECT %(start)s, {_GROUPS}, {_COLUMNS} FROM bounded ORDER BY {_GROUPS} {_UPSERT}
"""  # noqa: S608


def build_end_users() -> int:
    """Update the sums by end user, and return how many days were computed.

    It is safe to call at any time, from any number of processes, and after a crash. It does nothing before the first
    run of the other rollups, whose days are the sums of what was used before.
    """
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        state = RollupState.objects.first()
        if state is None:
            return 0
        cursor.execute("SELECT clock_timestamp()")
        before: datetime = cursor.fetchone()[0] - MARGIN
        if state.end_users_before is None:
            cursor.execute(_OLDER)
            since = state.settled_before - FIRST_RUN
        else:
            since = state.end_users_before - OVERLAP
        cursor.execute(_TOUCHED, {"before": before, "since": since})
        days = sorted(day.astimezone(UTC) for (day,) in cursor.fetchall())
        for day in days:
            cursor.execute(_DAY, _bounds(day, before))
        RollupState.objects.filter(pk=state.pk).update(end_users_before=before)
    return len(days)


def _bounds(day: datetime, before: datetime) -> dict[str, Any]:
    return {"start": day, "end": day + timedelta(days=1), "before": before, "most": MAX_END_USERS}
