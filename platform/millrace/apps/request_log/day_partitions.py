"""Day partitions of the request log: created ahead of time, and dropped once all their records have expired.

Days are UTC days. The first partition has all records from before the table was partitioned. A default partition has
the records of days without a partition, which are few. Their rows are deleted one by one.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import structlog
from django.db import OperationalError, connection

from billing.metering.partitions import existing_partitions
from millrace.apps.request_log.models import RequestRecord
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)

TABLE = RequestRecord._meta.db_table
DAYS_AHEAD = 3


def start_of_day(moment: datetime) -> datetime:
    """Return the beginning of the UTC day of `moment`."""
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def ensure_days(now: datetime | None = None) -> list[str]:
    """Create the missing partitions of the current and the next days. Return their names.

    Safe to call at any time, from any number of processes. Without locks within seconds it raises `OperationalError`.
    """
    today = start_of_day(now or datetime.now(UTC)).date()
    wanted = [today + timedelta(days=day) for day in range(DAYS_AHEAD + 1)]
    existing = set(existing_partitions(TABLE))
    missing = [day for day in wanted if f"{TABLE}_{day:%Y_%m_%d}" not in existing]
    if not missing:
        return []
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        # The function runs as the tables' owner, because no other role may change tables.
        cursor.execute("SELECT request_log_create_days(%s)", [missing])
        return list(cursor.fetchone()[0])


def drop_days(before: datetime) -> bool:
    """Drop the partitions whose records are all from before a time. Return False if readers of the log prevented it."""
    try:
        with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
            cursor.execute("SELECT request_log_drop_days(%s)", [before])
            (dropped,) = cursor.fetchone()
    except OperationalError as exc:
        log.warning("request_days_not_dropped", error=str(exc))
        return False
    if dropped:
        log.info("request_days_dropped", names=dropped)
    return True
