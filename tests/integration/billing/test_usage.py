"""Sums of usage from the table of events."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from billing.metering import usage
from billing.metering.ingest import UsageMessage, settle
from billing.metering.usage import TooManyRows, UsageReport, instant, span, total
from billing.models import SUMMED
from inference_worker.contract.messages import encode
from tenants.isolation.scopes import tenant_scope

pytestmark = pytest.mark.django_db
CANCELLED = "cancelled"
NOW = datetime.now(UTC).replace(minute=30, second=0, microsecond=0)


def store(*events):
    outcome = settle([UsageMessage(f"{number}-0", encode(event)) for number, event in enumerate(events)])
    assert outcome.settled == len(events)


def sums(question: UsageReport, *args: object) -> list[dict[str, object]]:
    with tenant_scope(question.tenant_id):
        return usage.sums(question, *args)


def test_sums_by_model(event):
    store(
        event(model="a", uncached=1, cache_read=2, cache_write_5m=3, cache_write_1h=4, output=5),
        event(
            model="a", uncached=10, cache_read=20, cache_write_5m=30, cache_write_1h=40, output=50, outcome="cancelled"
        ),
        event(model="b"),
    )
    first, second = sums(UsageReport(1), ("model",))
    assert first == dict.fromkeys(SUMMED, 0) | {
        **{"model": "a", "completed": 1, "cancelled": 1},
        **{"uncached": 11, "cache_read": 22, "cache_write_5m": 33, "cache_write_1h": 44, "output": 55},
    }
    assert second["model"] == "b"
    assert total([first, second])["output"] == 55 + 7


def test_a_failed_execution_counts_without_its_tokens(event):
    store(event(outcome="failed", output=5), event(output=6))
    (row,) = sums(UsageReport(1))
    assert (row["failed"], row["completed"], row["output"]) == (1, 1, 6)


def test_another_tenants_events_are_in_no_sum(event):
    store(event(tenant_id=1, output=5), event(tenant_id=2, output=6))
    assert sums(UsageReport(1))[0]["output"] == 5


def test_the_start_is_inclusive_and_the_end_exclusive(event):
    store(event(at=NOW, output=1), event(at=NOW + timedelta(microseconds=1), output=2))
    assert sums(UsageReport(1, NOW, NOW + timedelta(microseconds=1)))[0]["output"] == 1
    assert sums(UsageReport(1, NOW + timedelta(microseconds=1)))[0]["output"] == 2


def test_buckets_and_groups(event):
    earlier = NOW - timedelta(hours=1)
    store(event(at=NOW, key_id=8, project_id=1), event(at=NOW, key_id=9, project_id=1), event(at=earlier, key_id=9))
    rows = sums(UsageReport(1), ("key",), "hour")
    hour = NOW.replace(minute=0)
    assert [(row["start"], row["key_id"]) for row in rows] == [
        (hour - timedelta(hours=1), 9),
        (hour, 8),
        (hour, 9),
    ]
    assert [row["project_id"] for row in sums(UsageReport(1), ("project",))] == [1, 2]
    assert sum(row["completed"] for row in sums(UsageReport(1), (), "day")) == 3


def test_filters(event):
    store(event(model="a", key_id=8, project_id=5, request_id="r"), event(outcome="cancelled"))
    for name, value in {"model": "a", "key_id": 8, "project_id": 5, "request_id": "r", "outcome": "completed"}.items():
        with tenant_scope(1):
            assert UsageReport(1, **{name: value}).events().get().request_id == "r"
        with tenant_scope(2):
            assert UsageReport(2, **{name: value}).events().count() == 0


def test_no_usage_is_a_row_of_zeros_or_no_row():
    assert set(sums(UsageReport(1))[0].values()) == {0}
    assert sums(UsageReport(1), ("model",)) == []


def test_too_many_rows_are_rejected(event, monkeypatch):
    monkeypatch.setattr(usage, "MAX_ROWS", 2)
    store(*(event(key_id=number) for number in (1, 2)))
    assert len(sums(UsageReport(1), ("key",))) == 2
    store(event(key_id=3))
    with pytest.raises(TooManyRows):
        sums(UsageReport(1), ("key",))


def test_instants():
    assert instant("2026-11-01") == datetime(2026, 11, 1, tzinfo=UTC)
    assert instant("2026-11-01T01:00:00+01:00") == datetime(2026, 11, 1, tzinfo=UTC)
    assert instant("2026-11-01T00:00:00Z") == instant("2026-11-01T00:00:00")
    for wrong in ("yesterday", "2026-13-01", "0001-01-01", "9999-12-31T23:59:59-10:00", ""):
        with pytest.raises(ValueError, match=r".+"):
            instant(wrong)


def test_the_default_span_is_the_month_of_the_end():
    december = datetime(2026, 12, 1, tzinfo=UTC)
    assert span(None, december) == (datetime(2026, 11, 1, tzinfo=UTC), december)
    assert span(None, None)[0].day == 1
    with pytest.raises(ValueError, match="before"):
        span(december, december)
