"""The request log in the console: the list, its filters in the URL, and the details in the drawer."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing.budgets.budgets import do_change_budget, do_make_budget
from billing.models import BudgetPeriod, UsageEvent
from frontend.tenant.requests.timeline import events_of, timeline_of
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestContent, RequestRecord
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant, User
from tests.support.billing.books import price, use
from tests.support.frontend.console import meter
from tests.support.request_log import records
from tests.support.rows import of, only_project

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="readonly")]
NOW = datetime.now(UTC)


def record(tenant: Tenant, number: int = 0, **changes: Any) -> RequestRecord:
    """Create the record of a request this number of seconds ago."""
    fields = {"request_id": f"req_{number:08}", "started_at": NOW - timedelta(seconds=number)}
    return records.record(tenant, number, **fields | changes)


def listed(page: str) -> list[str]:
    return re.findall(r'href="/t/acme/requests/(req_\d+)"', page)


def get(client: Any, path: str, status: int = 200) -> str:
    response = client.get(path)
    assert response.status_code == status
    page = str(response.content.decode())
    assert "did not load" not in page
    return page


def linked(page: str, rel: str) -> str:
    (url,) = re.findall(rf'rel="{rel}" href="([^"]*)"', page)
    return unescape(url)


def test_pages_keep_their_filters(client, acme, monkeypatch):
    monkeypatch.setattr("frontend.tenant.requests.log.PAGE_SIZE", 2)
    for number in range(5):
        record(acme, number)
    record(acme, 5, outcome="refused", status="400", code="invalid_value")
    start = "/t/acme/requests/?outcome=completed&range=7d"
    first = get(client, start)
    assert listed(first) == ["req_00000000", "req_00000001"]
    assert 'rel="prev"' not in first
    second = get(client, linked(first, "next"))
    last = get(client, linked(second, "next"))
    assert listed(second) + listed(last) == ["req_00000002", "req_00000003", "req_00000004"]
    assert 'rel="next"' not in last
    assert listed(get(client, linked(last, "prev"))) == listed(second)
    assert "range=7d" in linked(first, "next")


def test_filters_are_in_the_url(client, acme):
    key, _ = actions.do_create_api_key(only_project(acme), "prod")
    record(acme, 0, key_id=key.pk, status="429", code="rate_limit_exceeded", outcome="limited")
    record(acme, 1, requested_model="other", key_id=key.pk + 1)
    for query, found in (
        (f"key={key.pk}", [0]),
        ("outcome=limited", [0]),
        ("code=rate_limit_exceeded", [0]),
        ("model=other", [1]),
        ("key=x&outcome=odd&cursor=odd", [0, 1]),  # invalid filters are ignored
        ("project=7", []),
    ):
        page = get(client, f"/t/acme/requests/?{query}&range=7d")
        assert listed(page) == [f"req_{number:08}" for number in found], query
    page = get(client, "/t/acme/requests/?outcome=limited&range=7d")
    assert '<a href="/t/acme/requests/?outcome=limited&amp;range=7d" aria-current="true">Rate limited</a>' in page
    assert 'href="/t/acme/requests/?range=7d" aria-label="Clear Status"' in page
    assert "No request matches" in get(client, "/t/acme/requests/?project=7")


def content(tenant: Tenant, row: RequestRecord, body: str, answer: str = "") -> None:
    with tenant_scope(tenant):
        RequestContent.objects.create(
            tenant_id=tenant.pk,
            request_id=row.request_id,
            started_at=row.started_at,
            body=body,
            answers=[answer],
            truncated=False,
        )


def test_requests_are_found_by_the_beginning_of_their_id_at_any_time(client, acme):
    record(acme, 0)
    record(acme, 17, started_at=NOW - timedelta(days=200))
    record(actions.do_create_tenant("other", "Other"), 18)
    assert listed(get(client, "/t/acme/requests/?q=req_0000001")) == ["req_00000017"]
    assert listed(get(client, "/t/acme/requests/?q=req_0000001&outcome=failed")) == []
    assert listed(get(client, "/t/acme/requests/?q=req_9")) == []


def test_stored_texts_are_searched_within_a_bound(client, acme, monkeypatch):
    rows = [record(acme, number) for number in range(3)]
    assert "Prompt logging is off" in get(client, "/t/acme/requests/?q=miller&range=24h")
    actions.do_update_settings(acme, content_retention_days=7)
    other = actions.do_create_tenant("other", "Other")
    actions.do_update_settings(other, content_retention_days=7)
    content(acme, rows[0], '{"messages": "The MILLER"}')
    content(acme, rows[1], "{}", "a miller’s tale")
    content(acme, rows[2], "{}", "100%")
    content(other, record(other, 8), "miller")
    assert listed(get(client, "/t/acme/requests/?q=miller&range=24h")) == ["req_00000000", "req_00000001"]
    assert listed(get(client, "/t/acme/requests/?q=0%25&range=24h")) == ["req_00000002"]
    assert listed(get(client, "/t/acme/requests/?q=mill%25&range=24h")) == []  # no wildcards
    assert listed(get(client, "/t/acme/requests/?q=miller&range=custom&from=2020-01-01&to=2020-02-01")) == []
    monkeypatch.setattr("millrace.apps.request_log.selectors.MAX_SEARCHED", 1)
    with CaptureQueriesContext(connection) as queries:
        page = get(client, "/t/acme/requests/?q=miller&range=24h")
    (search,) = [query["sql"] for query in queries if "strpos" in query["sql"]]
    assert "LIMIT 1 + 1\n" in search
    assert listed(page) == ["req_00000000"]
    assert "Searched the newest 1 stored requests" in page


def test_the_export_has_the_rows_that_are_shown(client, acme, monkeypatch):
    monkeypatch.setattr("millrace.apps.request_log.selectors.MAX_PAGE", 2)
    for number in range(5):
        record(acme, number, code="=cmd()" if number == 3 else "", requested_model="m" if number else "other")
    (url,) = re.findall(r'href="([^"]*requests/export[^"]*format=json[^"]*)"', get(client, "/t/acme/requests/?model=m"))
    response = client.get(unescape(url))
    assert [row["request_id"] for row in response.json()] == [f"req_{number:08}" for number in range(1, 5)]
    assert response.headers["Content-Disposition"].startswith('attachment; filename="requests-acme-')
    lines = client.get(unescape(url).replace("json", "csv")).content.decode().splitlines()
    assert len(lines) == 5
    assert ",'=cmd()," in lines[3]
    monkeypatch.setattr("frontend.tenant.requests.log.MAX_EXPORTED", 2)
    assert len(client.get(unescape(url)).json()) == 2


def test_figures_are_compared_with_the_previous_period(client, acme):
    for number in range(3):
        record(acme, number)
    record(acme, 3, started_at=NOW - timedelta(hours=30))
    assert "200.0%" in get(client, "/t/acme/requests/panels/stats?range=24h&compare=previous")
    assert "200.0%" not in get(client, "/t/acme/requests/panels/stats?range=24h")


@pytest.mark.parametrize(("name", "found"), [("today", 1), ("24h", 2), ("7d", 3), ("last-month", 0), ("month", 3)])
def test_date_ranges(client, acme, monkeypatch, name, found):
    """On the 10th at noon: a request an hour, 20 hours and two days ago."""
    now = NOW.replace(day=10, hour=12)

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return now.astimezone(tz)

    monkeypatch.setattr("frontend.core.page_context.datetime", Then)
    for number, hours in enumerate((1, 20, 48)):
        record(acme, number, started_at=now - timedelta(hours=hours))
    assert len(listed(get(client, f"/t/acme/requests/?range={name}"))) == found


def test_the_drawer_shows_the_details(client, acme):
    prices = [(price("3", number=NOW.month), 1000), (price("15", "output", number=NOW.month), 100)]
    use(acme, NOW, *prices)
    (event,) = of(UsageEvent, acme)
    limit = {"set": 1, "scope": "tenant", "model": "", "name": "requests_per_day", "cost": 1}
    limit |= {"limit": 1234, "left": 1233}
    place = {
        "execution": 0,
        "attempt": 1,
        "model": "alpha",
        "replica": "alpha-0.1",
        "by": "spill",
        "load": 3,
        "credits": 1,
    }
    record(acme, 0, request_id=event.request_id, limits=[limit], placements=[{**place, "queued_ms": 7}])
    page = get(client, f"/t/acme/requests/{event.request_id}")
    for text in (
        *("Requests per day", "1,233", "1,234", "alpha-0.1", "prefix replica overloaded", "7 ms"),
        *("3.00", "15.00", "0.003", "0.0015", "0.0045"),
    ):
        assert text in page, text
    fragment = client.get(f"/t/acme/requests/{event.request_id}", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in fragment
    assert "0.0045" in fragment


def test_the_timeline_has_every_execution(acme):
    """A failed execution, then a fallback: waits of both queues, and the average time per token."""
    began = NOW - timedelta(seconds=5)
    key = actions.do_create_api_key(only_project(acme), "k")[0]
    common: dict[str, Any] = {"key_id": key.pk, "project_id": key.project_id, "ttft_us": 90_000, "queue_us": 10_000}
    name = meter(acme, at=began + timedelta(milliseconds=6), duration_us=300_000, outcome="failed", **common)
    counts = {"uncached": 25, "cache_read": 75, "output": 101}
    at = began + timedelta(milliseconds=320)
    meter(acme, at=at, request_id=name, execution=1, duration_us=1_090_000, **counts, **common)
    placements = [{"execution": 0, "attempt": 1, "replica": "a", "by": "load", "queued_ms": 4}]
    placements.append({"execution": 1, "attempt": 1, "replica": "b", "by": "load"})
    record(acme, request_id=name, started_at=began, total_ms=1500, ttft_ms=420, placements=placements)
    with tenant_scope(acme):
        story = selectors.story(acme.pk, name)
    assert story is not None
    found = timeline_of(story)
    assert found is not None
    assert [(span.label, span.start, span.end) for span in found.whole] == [
        ("Admission", 0, 6_000),
        ("Gateway queue 1", 6_000, 10_000),
        ("Failed execution 1", 10_000, 310_000),
        ("Engine queue 2", 320_000, 330_000),
        ("Prefill 2", 330_000, 410_000),
        ("Decode 2", 410_000, 1_410_000),
    ]
    assert (found.total, found.first_token, found.decode) == ("1.50 s", "420 ms", "1.00 s")
    assert [span.label for span in found.first] == [span.label for span in found.whole[:-1]]
    assert (found.speed, found.per_token) == ("100.0", "10.0 ms")
    assert [(at, name) for at, name, _ in events_of(story)][-4:-2] == [
        ("+420 ms", "token.first"),
        ("+1,500 ms", "request.completed"),
    ]


def test_the_page_has_the_cache_the_messages_and_a_curl_command(client, acme):
    key = actions.do_create_api_key(only_project(acme), "k")[0]
    counts = {"uncached": 25, "cache_read": 75, "output": 2, "miss_reason": "prefix_changed", "changed_at": 75}
    row = record(acme, request_id=meter(acme, key_id=key.pk, project_id=key.project_id, **counts), max_tokens=9)
    page = unescape(get(client, f"/t/acme/requests/{row.request_id}"))
    for text in ("<b>75.0%</b> of the input, 75 of 100 tokens", "prefix changed from token 75", '"max_tokens": 9'):
        assert text in page, text
    assert "The messages were not stored" in page
    actions.do_update_settings(acme, content_retention_days=7)
    parts = [{"type": "text", "text": "It's <b>"}, {"type": "image_url", "image_url": {"url": "x"}}]
    content(
        acme,
        row,
        json.dumps({"model": "mine", "system": "Be brief.", "messages": [{"role": "user", "content": parts}]}),
        "Yes.",
    )
    page = get(client, f"/t/acme/requests/{row.request_id}")
    assert "<b>\n[image_url]" not in page  # escaped
    page = unescape(page)
    for text in (
        "<p>Be brief.</p>",
        "<p>It's <b>\n[image_url]</p>",
        "<p>Yes.</p>",
        "/v1/chat/completions",
        "It'\\''s <b>",
    ):
        assert text in page, text
    body = "not json"
    with tenant_scope(acme):
        RequestContent.objects.for_tenant(acme).filter(request_id=row.request_id).update(body=body)
    assert "Yes." in get(client, f"/t/acme/requests/{row.request_id}")


def test_a_rejection_names_the_limit(client, acme):
    bound = {"kind": "budget", "id": 1, "name": "One cent", "unit": "money", "period": "day", "left": 0, "needed": 5}
    bound["resets_at"] = "2026-12-01T00:00:00+00:00"
    row = record(acme, 0, outcome="limited", status="429", code="budget_exceeded", limited_by=bound, served_model="")
    page = get(client, f"/t/acme/requests/{row.request_id}")
    for text in ("Blocked by budget One cent", "2026-12-01 00:00 UTC", "Not routed (blocked)"):
        assert text in page, text
    assert "budget One cent" in get(client, "/t/acme/requests/")


def test_a_refusal_names_its_budget_and_no_model(client, acme):
    """The limit is the present one, with the temporary increase; the model was a candidate and did not run."""
    until = datetime.now(UTC) + timedelta(days=1)
    budget = do_make_budget(acme, name="One cent", unit="money", period="day", amount=10**7)
    do_change_budget(budget, temporary_increase=5 * 10**9, increase_expires_at=until)
    bound = {"kind": "budget", "id": budget.pk, "name": "One cent", "unit": "money", "period": "day"}
    bound |= {"left": 0, "needed": 5, "resets_at": None}
    row = record(acme, 0, outcome="limited", status="429", code="budget_exceeded", limited_by=bound)
    page = get(client, f"/t/acme/requests/{row.request_id}")
    assert "Served model" not in page and "alpha" not in page
    assert f'<a class="link" href="/t/acme/budgets/{budget.pk}/">One cent</a>' in page
    assert "Limit now $5.01, $5.00 of it until" in page
    assert "alpha" not in get(client, "/t/acme/requests/")
    with all_tenants_scope(BypassReason.COMMAND):
        window = BudgetPeriod.objects.create(
            tenant_id=acme.pk, budget_id=budget.pk, unit="money", period_start=NOW, rolled_over=10**9
        )
    ran = record(acme, 1, budget_periods=[window.pk])
    page = get(client, f"/t/acme/requests/{ran.request_id}")
    assert "Limit now $6.01, $5.00 of it until" in page
    assert "Served model" in page and "alpha" in page
    do_change_budget(budget, temporary_increase=0, increase_expires_at=None)
    assert "Limit now $1.01</dd>" in get(client, f"/t/acme/requests/{ran.request_id}")
    unnamed = record(acme, 2, outcome="limited", status="429", code="budget_exceeded", limited_by={"kind": "budget"})
    assert "Blocked by budget" in get(client, f"/t/acme/requests/{unnamed.request_id}")


def test_the_page_has_accepted_and_rejected_drafts(client, acme):
    name = meter(acme, uncached=25, output=9, accepted_drafts=4, rejected_drafts=3)
    record(acme, request_id=name)
    text = " ".join(re.sub(r"<[^>]+>", " ", get(client, f"/t/acme/requests/{name}")).split())
    assert "of that, accepted drafts 4 Rejected drafts, not billed 3" in text
    name = meter(acme, uncached=25, output=9)
    assert "drafts" not in get(client, f"/t/acme/requests/{name}")


def test_prices_are_named_by_their_effective_time(client, acme):
    use(acme, NOW, (price("3", number=NOW.month), 1000))
    (event,) = of(UsageEvent, acme)
    text = " ".join(re.sub(r"<[^>]+>", "", get(client, f"/t/acme/requests/{event.request_id}")).split())
    assert re.search(rf"Prices effective from 1 {NOW:%b}( 2026)?, 00:00, locked when received\.", text)
    assert "ersion" not in text.split("Time, tokens and cost")[1]


def test_costs_of_a_column_have_the_same_number_of_decimals(client, acme):
    for number, tokens in enumerate((2_000_000, 1_000, 7)):
        use(acme, NOW, (price("3", number=NOW.month, model=f"m{number}"), tokens), request_id=f"req_{number:08}")
        record(acme, number)
    shown = re.findall(
        r'data-label="Cost"><data[^>]*>([^<]+)<span class="cents">([^<]+)<', get(client, "/t/acme/requests/")
    )
    assert ["".join(parts) for parts in shown] == ["$6.000000", "$0.003000", "$0.000021"]


def test_another_tenants_request_returns_404(client, acme):
    other = record(actions.do_create_tenant("other", "Other"), 1)
    get(client, f"/t/acme/requests/{other.request_id}", 404)
    get(client, "/t/acme/requests/req_unknown", 404)
    get(client, "/t/other/requests/", 404)


def test_the_palette_finds_a_request_by_its_id(client, acme):
    row = record(acme, 7)
    assert f"/t/acme/requests/{row.request_id}" in get(client, f"/t/acme/search?q={row.request_id}")
    assert "/t/acme/requests/req_" not in get(client, "/t/acme/search?q=req_")


def test_an_unfinished_request_is_refreshed(client, acme, monkeypatch):
    use(acme, NOW, (price("3", number=NOW.month), 1000))
    (event,) = of(UsageEvent, acme)
    page = get(client, f"/t/acme/requests/{event.request_id}")
    assert "The record is being written" in page
    assert f'hx-get="/t/acme/requests/{event.request_id}"' in page
    assert 'hx-target="closest .request-detail"' in page
    assert 'class="card plain detail-page layout-stack request-detail"' in page
    monkeypatch.setattr("frontend.tenant.requests.detail.WRITE_DELAY", timedelta(0))
    assert "No request record available" in get(client, f"/t/acme/requests/{event.request_id}")
    place = {
        "execution": 0,
        "attempt": 1,
        "model": "alpha",
        "replica": "alpha-0.1",
        "by": "load",
        "load": 0,
        "credits": 1,
    }
    row = record(acme, started_at=datetime.now(UTC), placements=[place])
    assert "Usage is not settled yet" in get(client, f"/t/acme/requests/{row.request_id}")
    monkeypatch.undo()
    assert "Usage is being settled" in get(client, f"/t/acme/requests/{row.request_id}")


def test_the_palette_finds_requests_by_prefix_and_actions(client, acme):
    rows = [record(acme, number) for number in (7, 8, 90)]
    record(actions.do_create_tenant("other", "Other"), 9)
    found = get(client, "/t/acme/search?q=req_0000000")
    assert listed(found) == [rows[0].request_id, rows[1].request_id]
    assert "/keys/new" not in get(client, "/t/acme/search?q=create+key")  # a reader may not
    owner = User.objects.create_user("owner@example.com")
    actions.do_add_member(acme, owner, "owner")
    client.force_login(owner)
    budget = do_make_budget(acme, name="Nightly", unit="money", period="month", amount=10**9)
    assert "/keys/new" in get(client, "/t/acme/search?q=create+key")
    assert f"/t/acme/budgets/{budget.pk}/raise" in get(client, "/t/acme/search?q=raise+budget")
