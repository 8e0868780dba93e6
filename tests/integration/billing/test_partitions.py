"""Monthly partitions of the usage table, whose rows cannot be changed."""

from __future__ import annotations

import threading
from datetime import UTC, date, datetime

import pytest
from django.db import DatabaseError, connection, transaction

from billing.metering.ingest import UsageMessage, settle
from billing.metering.partitions import ensure_partitions, existing_partitions, month_of, shift_month
from billing.models import UsageEvent
from billing.tasks import make_partitions
from inference_worker.contract.messages import encode
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tests.support.rows import unscoped

FAR = datetime(2031, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
FAR_MONTHS = ["2031_11", "2031_12", "2032_01", "2032_02", "2032_03"]


def drop_far_partitions(as_owner) -> None:
    with as_owner(), connection.cursor() as cursor:
        for name in existing_partitions():
            if name > "billing_usageevent_2031":
                cursor.execute(f"DROP TABLE {name}")


@pytest.mark.parametrize(
    ("month", "by", "expected"),
    [
        (date(2026, 12, 1), 1, date(2027, 1, 1)),
        (date(2026, 1, 1), -1, date(2025, 12, 1)),
        (date(2026, 11, 1), 3, date(2027, 2, 1)),
        (date(2026, 5, 1), 24, date(2028, 5, 1)),
        (date(2026, 5, 1), 0, date(2026, 5, 1)),
    ],
)
def test_shifted(month, by, expected):
    assert shift_month(month, by) == expected


def test_partitions_are_months_in_utc():
    assert month_of(datetime.fromisoformat("2026-12-31T23:30:00-02:00")) == date(2027, 1, 1)


@pytest.mark.django_db
def test_the_migration_created_the_months():
    now = month_of(datetime.now(UTC))
    wanted = [f"billing_usageevent_{shift_month(now, offset):%Y_%m}" for offset in range(-1, 4)]
    assert set(wanted) <= set(existing_partitions())
    assert make_partitions() == []


@pytest.mark.django_db
def test_months_across_the_years_end_are_created_once():
    assert ensure_partitions(FAR) == [f"billing_usageevent_{month}" for month in FAR_MONTHS]
    assert ensure_partitions(FAR) == []


def test_concurrent_creations_create_each_month_once(table, as_owner):
    made: list[list[str]] = []
    start = threading.Barrier(6)

    def make() -> None:
        start.wait()
        made.append(ensure_partitions(FAR))
        connection.close()

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert sorted(map(len, made)) == [0, 0, 0, 0, 0, 5]
    finally:
        drop_far_partitions(as_owner)


@pytest.mark.django_db
def test_the_last_microsecond_of_a_month_belongs_to_it(event):
    this = month_of(datetime.now(UTC))
    first = datetime.combine(this, datetime.min.time(), UTC)
    last = datetime.fromtimestamp(first.timestamp() - 1, UTC).replace(microsecond=999_999)
    settle([UsageMessage("1-0", encode(event(at=first))), UsageMessage("2-0", encode(event(at=last)))])
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT tableoid::regclass::text, admitted_at FROM billing_usageevent ORDER BY admitted_at")
        assert cursor.fetchall() == [
            (f"billing_usageevent_{shift_month(this, -1):%Y_%m}", last),
            (f"billing_usageevent_{this:%Y_%m}", first),
        ]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE billing_usageevent SET output = 0",
        "DELETE FROM billing_usageevent",
        "TRUNCATE billing_usageevent",
        "UPDATE {partition} SET output = 0",
        "DELETE FROM {partition}",
        "TRUNCATE {partition}",
    ],
)
@pytest.mark.parametrize("made_later", [False, True])
def test_rows_cannot_be_changed(event, statement, made_later, as_owner):
    at = FAR if made_later else datetime.now(UTC)
    ensure_partitions(at)
    counts = dict.fromkeys(("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "block_size"), 0)
    times = dict.fromkeys(("queue_us", "ttft_us", "duration_us"), 0)
    ids = {"request_id": "r", "execution": 0, "tenant_id": 1, "project_id": 1, "key_id": 1, "model": "m", "attempt": 1}
    unscoped(UsageEvent).create(admitted_at=at, settled_at=at, outcome="completed", output=7, **ids, **counts, **times)
    partition = f"billing_usageevent_{at:%Y_%m}"
    with pytest.raises(DatabaseError, match="permission denied"), all_tenants_scope(BypassReason.COMMAND):
        connection.cursor().execute(statement.format(partition=partition))
    with pytest.raises(DatabaseError, match="append-only"), as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent NO FORCE ROW LEVEL SECURITY")
        cursor.execute(f"ALTER TABLE {partition} NO FORCE ROW LEVEL SECURITY")
        cursor.execute(statement.format(partition=partition))
    assert unscoped(UsageEvent).get(request_id="r").output == 7


def test_truncate_is_rejected_in_a_repeatable_read_transaction(table, as_owner):
    with (
        pytest.raises(DatabaseError, match="append-only"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("SET LOCAL ROLE NONE; SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("TRUNCATE billing_usageevent")


@pytest.mark.django_db
def test_model_and_table_agree():
    """The table is defined in SQL and the model in Python, so they could differ."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT column_name, is_nullable = 'YES', character_maximum_length FROM information_schema.columns"
            " WHERE table_name = 'billing_usageevent'"
        )
        table = {name: (null, length) for name, null, length in cursor.fetchall()}
        constraints = connection.introspection.get_constraints(cursor, "billing_usageevent")
    fields = {field.column: (field.null, field.max_length) for field in UsageEvent._meta.concrete_fields}
    assert table == fields
    named = {item.name for item in (*UsageEvent._meta.constraints, *UsageEvent._meta.indexes)}
    assert named <= set(constraints)
