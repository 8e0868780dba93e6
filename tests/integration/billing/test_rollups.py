"""Rollups by hour and day: results equal those of the events, whatever was rolled up and however often."""

from __future__ import annotations

import random
import threading
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import connection
from django.db.models import F

from billing.costs.margin import MarginQuery, margins
from billing.metering import rollups, usage
from billing.metering.ingest import UsageMessage, settle
from billing.metering.usage import UsageReport
from billing.models import GROUPED, SUMMED, Adjustment, RollupState, UsageRollup
from billing.periods import month_bounds
from frontend.operator.tenants import spending
from inference_worker.contract.messages import encode
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
HOUR = timedelta(hours=1)
QUESTIONS: list[tuple[dict[str, Any], tuple[str, ...], str | None]] = [
    ({}, (), None),
    ({}, ("model", "key"), None),
    ({}, ("model",), "hour"),
    ({}, ("tier", "miss_reason"), "day"),
    ({"start": NOON - timedelta(minutes=90), "end": NOON + timedelta(minutes=100)}, ("model",), "hour"),
    ({"start": NOON - timedelta(days=1, minutes=10), "end": NOON + HOUR}, ("project",), "day"),
    ({"start": NOON + timedelta(minutes=10), "end": NOON + timedelta(minutes=20)}, (), None),
    ({"model": "a", "key_id": 4}, ("key",), None),
    ({"key_ids": (3,)}, ("model",), "day"),
    ({"key_ids": ()}, ("key",), None),
    ({"start": NOON - timedelta(days=40), "project_id": 2}, (), "day"),
    ({}, ("key",), None),
    ({"start": NOON - timedelta(days=1, minutes=10), "end": NOON + HOUR}, ("key", "project"), "day"),
    ({"start": NOON - timedelta(days=2), "key_ids": (3, 4)}, ("key",), None),
    ({"start": NOON - timedelta(days=2), "key_id": 3}, (), "day"),
    ({"start": NOON - timedelta(days=2), "key_id": 3, "model": "a"}, ("tier",), "day"),
]
BY_KEY = QUESTIONS.index(({}, ("key",), None))


@pytest.fixture(autouse=True)
def _no_margin(monkeypatch):
    monkeypatch.setattr(rollups, "MARGIN", timedelta(0))


def store(*events) -> None:
    settle([UsageMessage(f"{number}-0", encode(event)) for number, event in enumerate(events)])


def answers(tenant: int = 1) -> list[Any]:
    with tenant_scope(tenant):
        return [usage.sums(UsageReport(tenant, **asked), groups, bucket) for asked, groups, bucket in QUESTIONS]


def of_all_tenants() -> list[Any]:
    """Return the results that read months."""
    first = NOON.replace(day=1, hour=0)
    with all_tenants_scope(BypassReason.OPERATOR):
        months = [f"{NOON - timedelta(days=31):%Y-%m}", f"{NOON:%Y-%m}"]
        queries = [MarginQuery(*months, with_uncosted=True), MarginQuery(months[1], months[1], 1, "a", (), True)]
        spent = spending.sum_usage(first), spending.sum_usage(first, 1), spending.sum_usage(first, 9)
        return [*(margins(query) for query in queries), *spent]


def some_events(event, seed: int, count: int = 60) -> list[Any]:
    chance = random.Random(seed)
    return [
        event(
            at=NOON + timedelta(minutes=chance.randrange(-2000, 900)),
            model=chance.choice("ab"),
            key_id=chance.choice((3, 4)),
            tenant_id=chance.choice((1, 1, 2)),
            outcome=chance.choice(("completed", "completed", "cancelled", "failed")),
            output=chance.randrange(50, 100),
            reasoning_tokens=chance.randrange(50),
            miss_reason=chance.choice(("", "first_use")),
        )
        for _ in range(count)
    ]


def fail(one) -> None:
    """Correct an event: its execution has failed."""
    context, usage_of_it = one.billing_context, one.usage
    names = ("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output", "answer_hit_input")
    counts = {name: -getattr(usage_of_it, name) for name in (*names, "answer_hit_output")}
    with all_tenants_scope(BypassReason.COMMAND):
        Adjustment.objects.create(
            admitted_at=datetime.fromtimestamp(context.admitted_at / 10**6, UTC),
            request_id=context.request_id,
            execution=context.execution,
            outcome="failed",
            tenant_id=context.tenant_id,
            project_id=context.project_id,
            key_id=context.key_id,
            model=context.model,
            price_ids=None,
            cost_femto=0,
            saved_femto=0,
            invoice_period=1,
            created_at=datetime.now(UTC),
            **counts,
        )


def test_results_are_equal_before_and_after_a_rollup(event):
    store(*some_events(event, 1))
    before, all_before = answers(), of_all_tenants()
    assert before[0][0]["output"] > before[0][0]["reasoning_tokens"] > 0
    rollups.build()
    assert unscoped(UsageRollup).count() > 10
    assert (answers(), of_all_tenants()) == (before, all_before)
    store(*some_events(event, 2))
    mixed, all_mixed = answers(), of_all_tenants()
    assert mixed[0][0]["output"] > before[0][0]["output"]
    assert all_mixed != all_before
    rollups.build()
    assert (answers(), of_all_tenants()) == (mixed, all_mixed)
    assert answers(2)[0][0]["output"] > 0


def test_rolled_up_hours_are_read_from_the_rollups(event, as_owner):
    store(event(at=NOON, output=5))
    rollups.build()
    with all_tenants_scope(BypassReason.COMMAND):
        UsageRollup.objects.all_tenants().update(output=7)
    assert answers()[0][0]["output"] == 7


def test_queries_without_keys_read_the_totals_of_all_keys(event):
    store(*some_events(event, 5))
    rollups.build()
    expected = answers()
    with all_tenants_scope(BypassReason.COMMAND):
        totals = UsageRollup.objects.all_tenants().filter(bucket__in=("hours", "days"))
        assert set(totals.values_list("key_id", flat=True)) == {0}
        totals.update(output=F("output") + 1)
    (changed,) = answers()[0]
    assert changed["output"] > expected[0][0]["output"]
    assert answers()[1] == expected[1]  # by key
    with all_tenants_scope(BypassReason.COMMAND):
        totals.update(output=F("output") - 1)
    assert answers() == expected


def test_queries_by_key_read_days_of_keys_and_those_of_all_tenants_months(event):
    store(*some_events(event, 8))
    rollups.build()
    expected, of_all = answers(), of_all_tenants()
    with all_tenants_scope(BypassReason.COMMAND):
        days = UsageRollup.objects.all_tenants().filter(bucket="kdays")
        assert set(days.values_list("model", "tier", "miss_reason")) == {("", "", "")}
        days.update(output=F("output") + 1)
        found = answers()
        assert sum(row["output"] for row in found[BY_KEY]) > sum(row["output"] for row in expected[BY_KEY])
        assert [number for number, rows in enumerate(found) if rows == expected[number]] == [*range(11), 12, 15]
        days.update(output=F("output") - 1)
        months = UsageRollup.objects.all_tenants().filter(bucket="month")
        assert set(months.values_list("project_id", "key_id", "tier")) == {(0, 0, "")}
        months.update(cost_femto=F("cost_femto") + 1)
    assert answers() == expected
    assert all(rows != others for rows, others in zip(of_all_tenants()[:4], of_all, strict=False))


@pytest.mark.parametrize("late", [False, True])
def test_coarse_sums_that_are_not_complete_are_not_read_until_the_next_run(event, late):
    """A process of the version before them has built the rollups, or they do not exist yet."""
    store(*some_events(event, 9))
    rollups.build()
    expected = answers(), of_all_tenants()
    with all_tenants_scope(BypassReason.COMMAND):
        UsageRollup.objects.all_tenants().filter(bucket__in=("kdays", "month")).delete()
        RollupState.objects.update(coarse_before=NOON - timedelta(days=2) if late else None)
        if not late:  # no hour is touched again
            later = datetime.now(UTC) + timedelta(minutes=30)
            RollupState.objects.update(settled_before=later, totals_before=later)
    assert (answers(), of_all_tenants()) == expected
    rollups.build()
    assert {"kdays", "month"} <= {row.bucket for row in unscoped(UsageRollup).all()}
    assert (answers(), of_all_tenants()) == expected


def test_equal_sums_are_not_written_again(event):
    store(*some_events(event, 10))
    rollups.build()

    def versions() -> dict[int, int]:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            cursor.execute("SELECT id, ctid::text FROM billing_usagerollup")
            return dict(cursor.fetchall())

    before = versions()
    store(event(at=NOON, model="c", key_id=5, tenant_id=3))
    rollups.build()
    after = versions()
    assert {pk: after[pk] for pk in before} == before
    assert len(after) - len(before) == 6


def test_totals_that_are_not_complete_are_not_read_until_the_next_run(event):
    """A process of the version before the totals has built the rollups, or the totals do not exist yet."""
    store(*some_events(event, 6))
    rollups.build()
    with all_tenants_scope(BypassReason.COMMAND):
        UsageRollup.objects.all_tenants().filter(bucket__in=("hours", "days")).delete()
        for totals_before in (None, NOON - timedelta(days=2)):
            RollupState.objects.update(totals_before=totals_before)
            expected = answers()
            assert expected[0][0]["output"] > 0
    rollups.build()
    assert any(row.bucket == "days" for row in unscoped(UsageRollup).all())
    assert answers() == expected


def test_the_first_run_builds_the_totals_of_all_rollups(event):
    store(*some_events(event, 7))
    rollups.build()
    expected = answers()
    with all_tenants_scope(BypassReason.COMMAND):
        UsageRollup.objects.all_tenants().filter(bucket__in=("hours", "days")).delete()
        later = datetime.now(UTC) + timedelta(minutes=30)  # no hour is touched again
        RollupState.objects.update(settled_before=later, totals_before=None)
    rollups.build()
    assert answers() == expected
    assert any(row.bucket == "hours" for row in unscoped(UsageRollup).all())


def months() -> list[Any]:
    rows = unscoped(UsageRollup).values_list("bucket", "start", *GROUPED, *SUMMED)
    return sorted(row for row in rows if row[0] == "month")


@pytest.mark.parametrize("seed", range(6))
def test_months_by_changes_equal_the_sums_of_their_days(event, seed, monkeypatch):
    """The other way is that of earlier versions: each run sums the changed months from all their days."""
    chance = random.Random(seed)
    first = NOON - timedelta(days=40)
    wanted = sorted({(first + timedelta(days=day)).date().replace(day=1) for day in range(42)})
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT billing_create_partitions(%s)", [wanted])
    store(event(at=first), event(at=NOON))
    rollups.build()
    summed_whole = rollups._MONTHS
    monkeypatch.setattr(rollups, "_MONTHS", None)  # the following runs do not read it
    correctable = []
    for part in range(6):
        events = [
            event(
                at=first + timedelta(minutes=chance.randrange(40 * 1440)),
                model=chance.choice("ab"),
                key_id=chance.choice((3, 4)),
                tenant_id=chance.choice((1, 1, 2)),
                outcome=chance.choice(("completed", "cancelled", "failed")),
                output=chance.randrange(100),
            )
            for _ in range(chance.randrange(1, 12))
        ]
        store(*events)
        correctable += [each for each in events if each.outcome == "completed"]
        if correctable and part % 2:
            fail(correctable.pop(chance.randrange(len(correctable))))
        rollups.build()
    by_changes = months()
    assert len({row[1] for row in by_changes}) > 1
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        UsageRollup.objects.all_tenants().filter(bucket="month").delete()
        cursor.execute(summed_whole.statement, rollups._ALL)
    assert by_changes == months()


def test_the_first_run_of_a_day_sums_whole_months(event):
    store(*some_events(event, 11))
    rollups.build()
    expected = months()
    with all_tenants_scope(BypassReason.COMMAND):
        UsageRollup.objects.all_tenants().filter(bucket="month").update(output=F("output") + 1)
        rollups.build()
        assert months() != expected
        yesterday = datetime.now(UTC) - timedelta(days=1)
        names = ("settled_before", "totals_before", "coarse_before")
        RollupState.objects.update(**dict.fromkeys(names, yesterday))
    rollups.build()
    assert months() == expected


def test_rollups_are_independent_of_order_and_repetition(event):
    events = some_events(event, 3)
    again = events * 3
    random.Random(4).shuffle(again)
    for start in range(0, len(again), 40):
        store(*again[start : start + 40])
        rollups.build()
    rows = ("bucket", "start", "tenant_id", "key_id", "model", *SUMMED)
    bit_by_bit = sorted(unscoped(UsageRollup).values_list(*rows))
    with all_tenants_scope(BypassReason.COMMAND):
        UsageRollup.objects.all_tenants().delete()
        RollupState.objects.all().delete()
    rollups.build()
    assert sorted(unscoped(UsageRollup).values_list(*rows)) == bit_by_bit


def test_a_correction_moves_the_sums(event):
    one = event(at=NOON, output=5, reasoning_tokens=3, uncached=10, cache_read=0, miss_reason="first_use")
    store(one)
    rollups.build()
    fail(one)
    for _ in range(2):
        (row,) = answers()[0]
        assert (row["completed"], row["failed"], row["uncached"], row["output"]) == (0, 1, 0, 0)
        assert row["reasoning_tokens"] == 0
        rollups.build()


def test_a_commit_after_a_run_is_included_by_the_next(event):
    store(event(at=NOON, output=5))
    rollups.build()
    with all_tenants_scope(BypassReason.COMMAND):
        RollupState.objects.update(settled_before=datetime.now(UTC) + timedelta(minutes=1))
    store(event(at=NOON, output=6))  # as if it had been settled before the run, and committed after it
    with all_tenants_scope(BypassReason.COMMAND):
        RollupState.objects.update(settled_before=datetime.now(UTC) + timedelta(seconds=1))
    rollups.build()
    assert answers()[0][0]["output"] == 11


def test_tenants_can_only_read_their_own_rollups(event):
    store(event(at=NOON, tenant_id=1), event(at=NOON, tenant_id=2))
    rollups.build()
    with tenant_scope(1), connection.cursor() as cursor:
        cursor.execute("SELECT DISTINCT tenant_id FROM billing_usagerollup")
        assert cursor.fetchall() == [(1,)]
        cursor.execute("SELECT has_table_privilege('billing_usagerollup', 'UPDATE')")
        assert cursor.fetchone() == (False,)


@pytest.mark.usefixtures("table")
@pytest.mark.django_db(transaction=True)
def test_concurrent_runs_and_settlements_lose_nothing(event):
    events = some_events(event, 6, 200)

    def settle_some(part: int) -> None:
        for start in range(part, 200, 20):
            store(*events[start : start + 10])
        connection.close()

    def roll() -> None:
        for _ in range(5):
            rollups.build()
        connection.close()

    threads = [threading.Thread(target=settle_some, args=(part,)) for part in (0, 10)]
    threads += [threading.Thread(target=roll) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rollups.build()
    rolled = answers()
    with all_tenants_scope(BypassReason.COMMAND):
        UsageRollup.objects.all_tenants().delete()
        RollupState.objects.all().delete()
    assert answers() == rolled
    assert rolled[0][0]["output"] > 0


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(
    ("name", "month", "hours", "days"),
    [
        ("America/New_York", 11, 721, {25: 1, 24: 29}),  # clocks go back on the 2nd
        ("America/New_York", 3, 743, {23: 1, 24: 30}),
        ("Asia/Tokyo", 11, 720, {24: 30}),
        ("America/Havana", 11, 721, {25: 1, 24: 29}),  # midnight comes twice
        ("UTC", 11, 720, {24: 30}),
    ],
)
def test_months_days_and_hours_are_in_the_time_zone(event, built, name, month, hours, days):
    """With one event per hour, and one before and after, a month contains exactly its local hours."""
    zone = UTC if name == "UTC" else ZoneInfo(name)
    start, end = month_bounds(name, 2025, month)
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT billing_create_partitions(%s)", [[date(2025, month + each, 1) for each in (-1, 0, 1)]])
    count = round((end - start) / HOUR)
    store(*[event(at=start + HOUR * number, output=1) for number in range(-1, count + 1)])
    if built:
        rollups.build()
    with tenant_scope(1):
        question = UsageReport(1, start, end)
        by_hour = usage.sums(question, (), "hour", zone)
        by_day = usage.sums(question, (), "day", zone)
        whole = usage.sums(UsageReport(1), (), "month", zone)
    assert [row["output"] for row in by_hour] == [1] * hours
    assert len({row["start"].astimezone(UTC) for row in by_hour}) == hours
    assert Counter(row["output"] for row in by_day) == days
    assert all((row["start"].hour, row["start"].tzinfo) == (0, zone) for row in by_day)
    assert [row["output"] for row in whole] == [1, hours, 1]
    assert whole[1]["start"].astimezone(UTC) == start


@pytest.mark.parametrize("name", ["Asia/Kolkata", "Australia/Lord_Howe"])
def test_time_zones_with_partial_hours_are_rejected(event, name):
    start, end = month_bounds(name, 2025, 10)  # Lord Howe's offset is a whole hour in half of the year
    with tenant_scope(1), pytest.raises(usage.OddHours):
        usage.sums(UsageReport(1, start, end), (), "day", ZoneInfo(name))
