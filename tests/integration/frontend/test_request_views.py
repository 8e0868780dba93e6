"""The list of requests: histogram, selected times, columns, live tail, and saved views."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from frontend.tenant.requests.log import bar_length
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestRecord
from millrace.apps.request_log.selectors import Filters
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import SavedView, Tenant, User
from tenants.models.views import MAX_VIEWS

pytestmark = pytest.mark.django_db
START = datetime(2026, 5, 4, 12, tzinfo=UTC)
END = START + timedelta(hours=48)
TIMES = "range=times&from=2026-05-04T12:00:00%2B00:00&to=2026-05-06T12:00:00%2B00:00"


@pytest.fixture
def owner(client: Any, acme: Tenant) -> User:
    user = User.objects.create_user("owner@example.com")
    actions.do_add_member(acme, user, "owner")
    client.force_login(user)
    return user


def record(tenant: Tenant, at: datetime, outcome: str = "completed", **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": f"req_{outcome}_{int((at - START).total_seconds())}",
        **{"project_id": 1, "key_id": 1, "gateway_id": "gw", "endpoint": "chat.completions", "stream": False},
        **{"requested_model": "m", "served_model": "m", "status": "200", "code": "", "total_ms": 5},
    }
    with tenant_scope(tenant):
        row: RequestRecord = RequestRecord.objects.create(
            tenant_id=tenant.pk, started_at=at, outcome=outcome, **fields | changes
        )
    return row


def get(client: Any, panel: str, query: str = "") -> Any:
    response = client.get(f"/t/acme/requests/panels/{panel}?{TIMES}&{query}", headers={"HX-Request": "true"})
    assert response.status_code == 200
    return response


def test_each_request_is_in_the_bar_of_its_time(acme):
    for at, outcome in ((START, "completed"), (START + timedelta(minutes=59), "failed"), (END, "completed")):
        record(acme, at, outcome)
    record(acme, END - timedelta(microseconds=1), "limited")
    record(acme, START + timedelta(hours=1), "refused")
    with tenant_scope(acme):
        bins = selectors.histogram(Filters(acme.pk, start=START, end=END), timedelta(hours=1), START)
    counts = [(bar.requests, bar.failed, bar.limited) for bar in bins]
    assert counts == [(2, 1, 0), (1, 0, 1), *[(0, 0, 0)] * 45, (1, 0, 1)]
    assert bins[0].start == START and bins[-1].end == END
    assert all(bar.end == after.start for bar, after in pairwise(bins))


def test_a_histogram_needs_a_period(acme):
    with tenant_scope(acme), pytest.raises(ValueError, match="period"):
        selectors.histogram(Filters(acme.pk), timedelta(hours=1), START)


def test_the_first_and_the_last_bar_reach_beyond_the_period(acme):
    record(acme, START + timedelta(minutes=70), "failed")
    with tenant_scope(acme):
        period = Filters(acme.pk, start=START + timedelta(minutes=30), end=START + timedelta(minutes=90))
        bins = selectors.histogram(period, timedelta(hours=1), START - timedelta(days=1))
    assert [(bar.start, bar.requests, bar.failed) for bar in bins] == [
        (START, 0, 0),
        (START + timedelta(hours=1), 1, 1),
    ]


@pytest.mark.parametrize(
    ("period", "length"),
    [
        (timedelta(minutes=5), timedelta(minutes=1)),
        (timedelta(hours=1), timedelta(minutes=1)),
        (timedelta(hours=24), timedelta(minutes=30)),
        (timedelta(days=7), timedelta(hours=3)),
        (timedelta(days=27, hours=11), timedelta(hours=12)),
        (timedelta(days=90), timedelta(days=2)),
        (timedelta(days=365), timedelta(days=7)),
        (timedelta(days=7 * 61), timedelta(days=14)),
    ],
)
def test_bars_have_natural_lengths(period, length):
    assert bar_length(period) == length


def test_a_bar_selects_its_time(client, acme, owner):
    record(acme, START + timedelta(minutes=30))
    record(acme, START + timedelta(hours=5), "failed")
    bars = get(client, "histogram").context["panel"]["bars"]
    assert [bar["bar"].requests for bar in bars if bar["bar"].requests] == [1, 1]
    page = client.get(bars[0]["url"]).content.decode()
    assert "4 May, 12:00 – 4 May 2026, 13:00" in page
    assert "req_completed_1800" in page and "req_failed" not in page


def test_other_times_and_filters_apply(client, acme, owner):
    record(acme, START, total_ms=10_000, cache_layer="computed")
    record(acme, START + timedelta(hours=1), total_ms=9_999, cache_layer="prefix")
    assert [len(get(client, "log", query).context["panel"]["page"].rows) for query in ("", "slow=10", "slow=2")] == [
        *(2, 1, 2)
    ]
    assert len(get(client, "log", "cache=prefix").context["panel"]["page"].rows) == 1
    for times in ("from=x&to=y", "from=2026-05-06&to=2026-05-04", "from=2020-01-01&to=2026-01-01"):
        assert client.get(f"/t/acme/requests/?range=times&{times}").status_code == 200


def test_columns_are_chosen_in_the_url(client, acme, owner):
    record(acme, START, end_user="customer-7")
    assert "customer-7" not in get(client, "log").content.decode()
    page = get(client, "log", "columns=user,cost").content.decode()
    assert "customer-7" in page
    assert re.findall(r'<th scope="col"[^>]*>([^<]+)', page) == ["Time", "Cost", "End user"]
    choices = {
        choice.label: choice for choice in client.get("/t/acme/requests/?columns=user").context["column_choices"]
    }
    assert choices["End user"].current and not choices["Cost"].current
    assert "columns=cost%2Cuser" in choices["Cost"].url
    assert "columns" not in choices["End user"].url  # without a column, the default ones are shown


def test_live_tail_refreshes_often(client, acme, owner):
    assert "every 30s" in client.get("/t/acme/requests/").content.decode()
    page = client.get("/t/acme/requests/?live=on").content.decode()
    assert "every 2s" in page and "every 30s" in page  # the figures refresh as before


def test_a_view_is_saved_replaced_and_deleted_by_its_user_only(client, acme, owner):
    sent = {"name": " Slow ones ", "query": "slow=10&columns=user&range=7d&cursor=x"}
    response = client.post("/t/acme/requests/views/save", sent)
    assert (response.status_code, response.url) == (303, "/t/acme/requests/?slow=10&columns=user")
    tabs = {
        tab.label: tab for tab in client.get("/t/acme/requests/?slow=10&columns=user&range=7d").context["views"].tabs
    }
    assert tabs["Slow ones"].current and not tabs["All"].current
    assert "range=7d" in tabs["All"].url
    client.post("/t/acme/requests/views/save", sent | {"query": "slow=60"})
    with tenant_scope(acme):
        view = SavedView.objects.for_tenant(acme).get()
    assert view.query == "slow=60"

    other = User.objects.create_user("other@example.com")
    actions.do_add_member(acme, other, "owner")
    client.force_login(other)
    assert "Slow ones" not in {tab.label for tab in client.get("/t/acme/requests/").context["views"].tabs}
    client.post("/t/acme/requests/views/delete", {"view": view.pk})
    client.force_login(owner)
    assert "Slow ones" in client.get("/t/acme/requests/").content.decode()
    client.post("/t/acme/requests/views/delete", {"view": view.pk})
    assert "Slow ones" not in client.get("/t/acme/requests/").content.decode()


@pytest.mark.parametrize("sent", [{"name": ""}, {"name": "x" * 41}, {"name": "a", "query": f"q={'x' * 1000}"}])
def test_a_view_that_cannot_be_saved_is_an_error(client, acme, owner, sent):
    response = client.post("/t/acme/requests/views/save", sent, follow=True)
    assert 'class="toast error"' in response.content.decode()
    with tenant_scope(acme):
        assert not SavedView.objects.for_tenant(acme).exists()


def test_the_number_of_views_is_limited(acme, owner):
    for number in range(MAX_VIEWS):
        actions.do_save_view(acme, owner, "requests", f"View {number}", "")
    actions.do_save_view(acme, owner, "requests", "View 0", "slow=1")
    with pytest.raises(actions.Conflict):
        actions.do_save_view(acme, owner, "requests", "One more", "")
