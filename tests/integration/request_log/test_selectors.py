"""The request log: pages, details of a request with its costs, rates, and retention."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing.models import Budget, BudgetPeriod, UsageEvent
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestContent, RequestOutcome, RequestRecord
from millrace.apps.request_log.selectors import BadCursor, Filters
from millrace.apps.request_log.tasks import purge_expired
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant
from tests.support.billing.books import price, take_back, use
from tests.support.request_log.records import NOW, record
from tests.support.rows import of, unscoped
from tests.support.tenants.management_api import by_key

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


def names(page: selectors.RequestPage) -> list[str]:
    return [row.record.request_id for row in page.rows]


def page_of(tenant: Tenant, cursor: str | None = None, size: int = 50, **filters: Any) -> selectors.RequestPage:
    with tenant_scope(tenant):
        return selectors.requests_page(Filters(tenant.pk, **filters), cursor, size)


def test_lists_are_paged_in_both_directions(acme):
    for number in range(5):
        record(acme, number)
    record(acme, 5, started_at=NOW - timedelta(minutes=4), request_id="req_0035")  # at the same time as another
    first = page_of(acme, size=2)
    assert (names(first), first.newer) == (["req_000", "req_001"], None)
    second = page_of(acme, first.older, 2)
    third = page_of(acme, second.older, 2)
    assert names(second) + names(third) == ["req_002", "req_003", "req_004", "req_0035"]
    assert third.older is None
    back = page_of(acme, third.newer, 2)
    assert names(back) == names(second)
    assert names(page_of(acme, back.newer, 2)) == names(first)
    assert page_of(acme, back.newer, 2).newer is None
    for cursor in ("", "x", "eA", "Zg==", "ÿ"):
        with pytest.raises(BadCursor):
            page_of(acme, cursor)


def test_filters(acme):
    record(acme, 0, key_id=7, status="429", code="rate_limit_exceeded", outcome="limited", served_model="")
    record(acme, 1, project_id=8, requested_model="other")
    record(acme, 2, endpoint="batch")
    for filters, found in (
        ({"key_id": 7}, [0]),
        ({"project_id": 8}, [1]),
        ({"outcome": "limited"}, [0]),
        ({"outcome": "completed"}, [1, 2]),
        ({"status": "429"}, [0]),
        ({"code": "rate_limit_exceeded"}, [0]),
        ({"endpoint": "batch"}, [2]),
        ({"model": "mine"}, [0, 2]),
        ({"model": "alpha"}, [1, 2]),
        ({"start": NOW - timedelta(minutes=1)}, [0, 1]),
        ({"end": NOW - timedelta(minutes=1)}, [2]),
    ):
        assert names(page_of(acme, **filters)) == [f"req_{number:03}" for number in found], filters


def test_pages_contain_usage_for_any_length(acme):
    line = price("3"), 1000
    for number in range(9):
        use(acme, NOW - timedelta(minutes=number), line)
        record(acme, number, request_id=of(UsageEvent, acme)[-1].request_id)
    with CaptureQueriesContext(connection) as few:
        assert len(page_of(acme, size=2).rows) == 2
    with CaptureQueriesContext(connection) as many:
        page = page_of(acme)
    assert len(few) == len(many)
    events = {event.request_id: event for event in of(UsageEvent, acme)}
    for row in page.rows:
        assert row.usage is not None
        assert row.usage.cost_femto == events[row.record.request_id].cost_femto == 1000 * 3 * 10**9
        assert (row.usage.tokens["uncached"], row.usage.executions) == (1000, 1)


def test_the_details_contain_the_priced_components(acme):
    prices = [(price("3"), 1000), (price("0.30", "cache_read"), 9000), (price("15", "output"), 500)]
    use(acme, NOW, *prices)
    (event,) = of(UsageEvent, acme)
    with tenant_scope(acme):
        budget = Budget.objects.create(tenant=acme, name="All", unit="money", period="month", amount=10**9)
    with all_tenants_scope(BypassReason.COMMAND):
        window = BudgetPeriod.objects.create(tenant_id=acme.pk, budget_id=budget.pk, unit="money", period_start=NOW)
    record(acme, 0, request_id=event.request_id, budget_periods=[window.pk], reserved_nano=91_440_000)
    replay = record(acme, -1, replay_of=event.request_id)
    take_back(event, NOW)
    with tenant_scope(acme):
        story = selectors.story(acme.pk, event.request_id)
    assert story is not None
    (execution,) = story.executions
    assert [(line.component, line.tokens, line.femto) for line in execution.lines] == [
        ("uncached", 1000, 3000 * 10**9),
        ("cache_read", 9000, 2700 * 10**9),
        ("output", 500, 7500 * 10**9),
    ]
    assert sum(line.femto for line in execution.lines) == event.cost_femto
    assert (len(execution.adjustments), story.cost_femto) == (1, 0)  # and it was reversed
    assert [(each.name, each.scope, each.amount) for each in story.budgets] == [("All", "tenant", 10**9)]
    assert (story.reserved_nano, story.others) == (91_440_000, (replay,))


def test_the_details_of_a_request_with_several_prompts(acme):
    line = price("3"), 10
    for name in ("req_a", "req_a.1", "req_a.2", "req_a.3"):  # the last one has no key
        use(acme, NOW, line, request_id=name)
    record(acme, 0, request_id="req_a", prompts=3)
    with tenant_scope(acme):
        story = selectors.story(acme.pk, "req_a")
    assert story is not None
    assert [execution.event.request_id for execution in story.executions] == ["req_a", "req_a.1", "req_a.2"]
    (row,) = page_of(acme).rows
    assert row.usage is not None
    assert (row.usage.cost_femto, row.usage.executions) == (story.cost_femto, 3) == (3 * 30 * 10**9, 3)


def test_the_details_of_an_unrecorded_request_come_from_its_usage(acme):
    use(acme, NOW, (price("3"), 10))
    (event,) = of(UsageEvent, acme)
    with tenant_scope(acme):
        story = selectors.story(acme.pk, event.request_id)
        assert story is not None
        assert (story.record, len(story.executions), story.settled) == (None, 1, True)
        assert selectors.story(acme.pk, "req_unknown") is None


def test_another_tenants_requests_are_not_visible(acme):
    other = actions.do_create_tenant("other", "Other")
    use(other, NOW, (price("3"), 10))
    (event,) = of(UsageEvent, other)
    record(other, 0, request_id=event.request_id)
    record(other, 1)
    with tenant_scope(acme):
        assert selectors.story(acme.pk, event.request_id) is None
        assert selectors.rates(acme.pk, NOW - timedelta(days=9), NOW + timedelta(days=1)).total.requests == 0
    assert names(page_of(acme)) == []
    client = by_key(acme)
    for name in (event.request_id, "req_001", "req_unknown"):
        assert client.get(f"/api/requests/{name}").status_code == 404
    assert client.get("/api/requests").json()["results"] == []


@pytest.mark.parametrize("outcomes", [(), ("completed", "completed", "failed"), tuple(RequestOutcome.values) * 2])
def test_the_rates_by_outcome_are_the_total_of_all_rates(acme, outcomes):
    for number, outcome in enumerate(outcomes):
        record(acme, number, outcome=outcome)
    with tenant_scope(acme):
        rates = selectors.rates(acme.pk, NOW - timedelta(hours=2), NOW + timedelta(seconds=1))
        found = selectors.total_rates(acme.pk, NOW - timedelta(hours=2), NOW + timedelta(seconds=1), with_ttft=True)
        assert found.total == replace(rates.total, ttft_p50_ms=None, ttft_p95_ms=None)
        assert found.bounds == rates.bounds
        assert selectors.total_rates(acme.pk, NOW, NOW, with_ttft=True).total.requests == 0


def test_rates_by_hour(acme):
    bound = {"kind": "limit", "scope": "key", "id": 3, "name": "requests_per_minute", "model": "", "limit": 1}
    for number, ttft in enumerate((100, 200, 300, 400)):
        record(acme, number, ttft_ms=ttft)
    record(acme, 4, outcome="failed", status="503")
    for number in (5, 6):
        record(acme, number, outcome="limited", status="429", limited_by=bound)
    record(acme, 40, outcome="limited", status="429", limited_by={"kind": "budget", "id": 9, "name": "All"})
    record(acme, 41, outcome="refused", status="400")
    with tenant_scope(acme):
        rates = selectors.rates(acme.pk, NOW - timedelta(hours=2), NOW + timedelta(seconds=1))
    before, last = rates.buckets
    assert (before.start.hour, before.requests, before.limited, before.refused, before.ttft_p95_ms) == (
        11,
        2,
        1,
        1,
        None,
    )
    assert (last.start.hour, last.requests, last.completed, last.failed, last.limited) == (12, 7, 4, 1, 2)
    assert (last.ttft_p50_ms, last.ttft_p95_ms) == (200, 400)
    assert (rates.total.requests, rates.total.ttft_p50_ms) == (9, 200)
    assert [(each.kind, each.id, each.name, each.requests) for each in rates.bounds] == [
        ("limit", 3, "requests_per_minute", 2),
        ("budget", 9, "All", 1),
    ]


# API


def test_the_requests_api(acme):
    client = by_key(acme)
    use(acme, NOW, (price("3"), 1000))
    (event,) = of(UsageEvent, acme)
    record(acme, 0, request_id=event.request_id, limits=[{"set": 1, "name": "requests_per_minute", "left": 4}])
    record(acme, 1, outcome="limited", status="429")
    page = client.get("/api/requests?limit=1").json()
    assert [row["request_id"] for row in page["results"]] == [event.request_id]
    assert page["results"][0]["usage"]["usd"] == "0.003"
    assert page["previous"] is None
    older = client.get(page["next"]).json()
    assert ([row["status"] for row in older["results"]], older["results"][0]["usage"]) == (["429"], None)
    assert client.get(older["previous"]).json()["results"] == page["results"]
    reported = client.get(f"/api/requests/{event.request_id}").json()
    assert reported["usd"] == "0.003"
    assert reported["record"]["limits"][0]["left"] == 4
    (line,) = reported["executions"][0]["lines"]
    arithmetic = (line["component"], line["tokens"], line["usd_per_million"], line["usd"])
    assert arithmetic == ("uncached", 1000, "3.00", "0.003")
    times = {"from": (NOW - timedelta(hours=1)).isoformat(), "to": (NOW + timedelta(hours=1)).isoformat()}
    rates = client.get("/api/requests/rates", times).json()
    assert (rates["total"]["requests"], rates["total"]["limited"], rates["ttft_slo_ms"]) == (2, 1, 1000)
    for query in ("cursor=x", "outcome=odd", "frm=1", "from=2026-11-02&to=2026-11-01", "key=0"):
        assert client.get(f"/api/requests?{query}").status_code == 400, query
    assert client.get("/api/requests/rates?from=2020-01-01&to=2026-01-01").status_code == 400
    assert client.get("/api/requests?outcome=limited").json()["results"][0]["request_id"] == "req_001"


# Retention


def content(tenant: Tenant, name: str, at: datetime) -> None:
    with tenant_scope(tenant):
        RequestContent.objects.create(
            tenant_id=tenant.pk, request_id=name, started_at=at, body="{}", answers=["yes"], truncated=False
        )


def test_contents_are_kept_for_the_tenants_retention_time(acme):
    now = datetime.now(UTC)
    client = by_key(acme)
    assert client.patch("/api/tenant", {"content_retention_days": 3}).json()["content_retention_days"] == 3
    for days in (1, 2, 5):
        record(acme, days)
        content(acme, f"req_{days:03}", now - timedelta(days=days))
    assert client.get("/api/requests/req_001").json()["content"] == {
        **{"body": "{}", "answers": ["yes"], "truncated": False}
    }
    assert client.get("/api/requests/req_005").json()["content"] is None
    purge_expired(now)
    assert {row.request_id for row in of(RequestContent, acme)} == {"req_001", "req_002"}
    assert client.patch("/api/tenant", {"content_retention_days": 0}).status_code == 200
    assert client.get("/api/requests/req_001").json()["content"] is None
    purge_expired(now)
    assert of(RequestContent, acme) == []
    assert client.patch("/api/tenant", {"content_retention_days": 91}).status_code == 400


def test_records_are_removed_when_old_or_with_their_tenant(acme, monkeypatch):
    monkeypatch.setattr("millrace.apps.request_log.row_deletion.DELETE_BATCH_SIZE", 2)
    for number in range(5):
        record(acme, number, started_at=NOW - timedelta(days=29 + number / 2))
    gone = actions.do_create_tenant("gone", "Gone")
    record(gone, 9)
    content(gone, "req_009", NOW)
    actions.do_delete_tenant(gone)
    actions.do_purge_tenant(gone, now=datetime.now(UTC) + timedelta(days=400))
    assert purge_expired(NOW) == 3  # one is from the day of the cut, which is removed as a whole
    kept = {"req_000", "req_001", "req_002", "req_003"}
    assert {row.request_id for row in unscoped(RequestRecord).all()} == kept
    assert unscoped(RequestContent).count() == 0
