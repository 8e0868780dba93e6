"""Day partitions of the request log: created ahead of time, filled by day, and dropped as a whole."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connection

from billing.metering.partitions import existing_partitions
from millrace.apps.request_log.day_partitions import DAYS_AHEAD, TABLE, drop_days, ensure_days, start_of_day
from millrace.apps.request_log.models import ChangedDay, RequestRecord
from millrace.apps.request_log.tasks import make_days, purge_expired
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant
from tests.support.request_log.records import record
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
FAR = datetime(2031, 12, 30, 23, 59, tzinfo=UTC)
DAY = timedelta(days=1)
FAR_DAYS = [f"{TABLE}_{day}" for day in ("2031_12_30", "2031_12_31", "2032_01_01", "2032_01_02")]
BEFORE, DEFAULT = f"{TABLE}_before", f"{TABLE}_default"


def partition_of_each() -> dict[str, str]:
    """Return the partitions of all records, by request ID."""
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT request_id, tableoid::regclass::text FROM request_log_requestrecord")
        return dict(cursor.fetchall())


def test_the_migration_created_the_partitions() -> None:
    assert {BEFORE, DEFAULT} <= set(existing_partitions(TABLE))
    make_days()  # nothing, unless a day has begun since the migration
    assert make_days() == []


def test_days_across_the_years_end_are_created_once() -> None:
    assert ensure_days(FAR) == FAR_DAYS
    assert len(FAR_DAYS) == DAYS_AHEAD + 1
    assert ensure_days(FAR) == []


def test_records_are_in_the_partition_of_their_utc_day(acme: Tenant) -> None:
    ensure_days(FAR)
    for number, at in enumerate((FAR, FAR + timedelta(minutes=1), FAR - DAY, datetime.now(UTC))):
        record(acme, number, started_at=at)
    expected = (FAR_DAYS[0], FAR_DAYS[1], DEFAULT, BEFORE)
    assert partition_of_each() == {f"req_{number:03}": name for number, name in enumerate(expected)}
    with tenant_scope(acme):
        found = RequestRecord.objects.for_tenant(acme).filter(request_id__startswith="req_")
        assert found.count() == 4


def test_records_without_a_partition_move_to_it_when_it_is_created(acme: Tenant) -> None:
    row = record(acme, started_at=FAR, requested_model="early")
    record(acme, 1, started_at=FAR - DAY)
    assert partition_of_each()[row.request_id] == DEFAULT
    ensure_days(FAR)
    assert partition_of_each() == {row.request_id: FAR_DAYS[0], "req_001": DEFAULT}
    models = {found.request_id: found.requested_model for found in unscoped(RequestRecord).all()}
    assert models == {row.request_id: "early", "req_001": "mine"}
    assert not unscoped(ChangedDay).exists()


def test_partitions_show_no_rows_without_a_scope(acme: Tenant) -> None:
    ensure_days(FAR)
    record(acme, started_at=FAR)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.relrowsecurity AND c.relforcerowsecurity, has_table_privilege('millrace_app', c.oid, 'SELECT'),"
            " has_table_privilege('millrace_system', c.oid, 'DELETE')"
            " FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = to_regclass(%s)",
            [TABLE],
        )
        assert set(cursor.fetchall()) == {(True, False, False)}
    with tenant_scope(acme.pk + 1), connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM request_log_requestrecord")
        assert cursor.fetchone() == (0,)


def test_expired_days_are_dropped(acme: Tenant) -> None:
    ensure_days(FAR)
    for number in range(3):
        record(acme, number, started_at=FAR + number * DAY)
    kept = timedelta(days=settings.MILLRACE.request_log_retention_days)
    assert purge_expired(start_of_day(FAR) + DAY + kept + timedelta(hours=23)) == 0  # no row is deleted
    assert partition_of_each() == {"req_001": FAR_DAYS[1], "req_002": FAR_DAYS[2]}
    assert FAR_DAYS[0] not in existing_partitions(TABLE)
    assert set(FAR_DAYS[1:]) <= set(existing_partitions(TABLE))
    record(acme, 3, started_at=FAR)  # late: it is deleted by the next run
    assert partition_of_each()["req_003"] == DEFAULT
    assert purge_expired(start_of_day(FAR) + DAY + kept) == 1
    assert set(partition_of_each()) == {"req_001", "req_002"}


def test_rows_at_equal_places_of_other_partitions_are_not_deleted(acme: Tenant) -> None:
    ensure_days(FAR)
    record(acme, 0)
    record(acme, 1, started_at=FAR)
    assert partition_of_each() == {"req_000": BEFORE, "req_001": FAR_DAYS[0]}
    now = unscoped(RequestRecord).get(request_id="req_000").started_at
    kept = timedelta(days=settings.MILLRACE.request_log_retention_days)
    assert purge_expired(now + kept + DAY) == 1
    assert set(partition_of_each()) == {"req_001"}


def test_a_purge_reads_only_partitions_with_expired_records(acme: Tenant) -> None:
    ensure_days(FAR)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        statement = "EXPLAIN SELECT 1 FROM request_log_requestrecord WHERE started_at < %s"
        cursor.execute(statement, [datetime.now(UTC) - 30 * DAY])
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert BEFORE in plan
    assert FAR_DAYS[0] not in plan


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("table")
def test_a_day_that_is_read_is_dropped_by_a_later_run() -> None:
    """Writers wait behind the drop, so it gives up soon."""
    results: list[bool] = []

    def drop() -> None:
        results.append(drop_days(FAR))
        connection.close()

    partitions = existing_partitions(TABLE)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM request_log_requestrecord")
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
    assert results == [False]
    assert existing_partitions(TABLE) == partitions


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("table")
def test_concurrent_creations_create_each_day_once(as_owner: Any) -> None:
    made: list[list[str]] = []
    start = threading.Barrier(4)

    def make() -> None:
        start.wait()
        made.append(ensure_days(FAR))
        connection.close()

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert sorted(map(len, made)) == [0, 0, 0, DAYS_AHEAD + 1]
    finally:
        with as_owner(), connection.cursor() as cursor:
            for name in FAR_DAYS:
                cursor.execute(f"DROP TABLE IF EXISTS {name}")
