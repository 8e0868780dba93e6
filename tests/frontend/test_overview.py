"""The tenant's overview: exact figures, its own only, and whatever it is asked for in a bounded number of queries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import redis
from django.conf import settings

from billing import status
from frontend.overview import Overview
from frontend.overview import overview as overview_in_scope
from tenants import actions
from tenants.models import Tenant, User
from tenants.scoping import tenant_scope
from tests.seeing import only_project

pytestmark = pytest.mark.django_db
NOON = datetime.now(UTC).replace(day=15, hour=12, minute=0, second=0, microsecond=0)  # in a month that has a partition


@pytest.fixture
def acme() -> Tenant:
    return actions.do_create_tenant("acme", "Acme")


@pytest.fixture
def member(client, acme) -> User:
    user = User.objects.create_user("dev@example.com")
    actions.do_add_member(acme, user, "readonly")
    client.force_login(user)
    return user


def overview(tenant: Tenant, now: datetime) -> Overview:
    with tenant_scope(tenant):
        return overview_in_scope(tenant, now)


def page_of(client, slug: str = "acme") -> str:
    response = client.get(f"/t/{slug}/")
    assert response.status_code == 200
    return response.content.decode()


def test_it_works(client, acme, member, use):
    key, _ = actions.do_create_api_key(only_project(acme), "k")
    request_id = use(
        acme, key_id=key.pk, uncached=1234, cache_read=64, output=7, ttft_us=184_000, duration_us=2_310_000
    )
    page = page_of(client)
    for text in (request_id, key.prefix, "1,234", "184 ms", "2.31 s", "Completed", "Read Only", "smollm2-135m"):
        assert text in page, text
    assert "Send the first request" not in page


def test_it_rejects_other_tenants(client, acme, member, use):
    other = actions.do_create_tenant("other", "Other")
    theirs = use(other, uncached=987_654)
    use(acme)
    assert theirs not in page_of(client)
    assert "987,654" not in page_of(client)
    assert client.get("/t/other/").status_code == 404
    assert client.get("/t/nobody/").status_code == 404
    assert client.get("/t/other/").content == client.get("/t/nobody/").content


def test_who_is_not_logged_in_is_asked_to(client, acme):
    assert client.get("/t/acme/").url == "/login?next=/t/acme/"


def test_an_operator_sees_it_too(client, acme):
    client.force_login(User.objects.create_superuser("op@example.com"))
    assert "Seen as operator" in page_of(client)


def test_empty_shows_what_to_type(client, acme, member):
    _, secret = actions.do_create_api_key(only_project(acme), "k")
    page = page_of(client)
    assert "Bearer $MILLRACE_KEY" in page
    assert secret[:12] not in page
    assert "Send the first request" in page
    assert "http://127.0.0.1:8000/v1/chat/completions" in page
    assert "smollm2-135m" in page


def test_suspended_says_so(client, acme, member):
    actions.do_suspend_tenant(acme)
    assert "This account is suspended" in page_of(client)


def test_figures_are_exact(acme, use):
    counts = {"uncached": 10, "cache_read": 60, "cache_write_5m": 20, "cache_write_1h": 10, "output": 100}
    use(acme, at=NOON, **counts)
    use(acme, at=NOON - timedelta(days=1), verdict="cancelled", **counts)
    use(acme, at=NOON - timedelta(days=1), verdict="failed", **counts)
    page = overview(acme, NOON + timedelta(hours=1))
    assert [(f.label, f.month_exact, f.today) for f in page.figures] == [
        ("Requests", "3", "1"),
        ("Input tokens", "200", "100"),
        ("Output tokens", "200", "100"),
        ("Input served from cache", "120 of 200", "60.0%"),
        ("Failed, not billed", "1", "0"),
    ]
    assert [(row.today, row.month, row.part) for row in page.classes] == [
        ("10", "20", "5.0%"),
        ("60", "120", "30.0%"),
        ("20", "40", "10.0%"),
        ("10", "20", "5.0%"),
        ("100", "200", "50.0%"),
    ]
    assert [(day.day.day, day.requests, day.output) for day in page.chart.days] == [(14, "2", "100"), (15, "1", "100")]


def test_the_chart_stacks_without_gaps(acme, use):
    use(acme, at=NOON, uncached=25, cache_read=25, output=50)
    use(acme, at=NOON - timedelta(days=1), output=50)
    slabs = overview(acme, NOON + timedelta(hours=1)).chart.slabs
    assert [(slab.kind, slab.y, slab.height) for slab in slabs] == [
        ("output", 90, 90),
        ("cached", 135, 45),
        ("uncached", 90, 45),
        ("output", 0, 90),
    ]
    assert slabs[0].x < slabs[1].x == slabs[3].x


def test_the_latest_come_first_and_twenty_at_most(acme, use):
    sent = [use(acme, at=NOON - timedelta(minutes=age), request_id=f"r{age:02}") for age in range(22)]
    assert [row.request_id for row in overview(acme, NOON).latest] == sent[:20]


@pytest.mark.parametrize("requests", [1, 15])
def test_queries_are_bounded(client, acme, member, use, requests, django_assert_num_queries):
    project = only_project(acme)
    for _ in range(requests):
        key, _ = actions.do_create_api_key(project, "k")
        use(acme, key_id=key.pk)
    with django_assert_num_queries(14):
        page_of(client)


def test_it_says_how_far_it_is_metered(client, acme, member):
    with redis.Redis.from_url(settings.CACHES["default"]["LOCATION"]) as broker:
        broker.delete(status.STATUS_KEY)
        assert "not known right now" in page_of(client)
        at = datetime.now(UTC)
        said = status.SettlerStatus(int(at.timestamp() * 1e6), "s", 0, 0, 0, None, 4, lag_ms=90_000)
        broker.set(status.STATUS_KEY, status.encode(said))
        assert f"{at - timedelta(seconds=90):%H:%M:%S}</time>" in page_of(client)
        assert "metering has stopped" not in page_of(client)
        broker.set(status.STATUS_KEY, status.encode(status.SettlerStatus(0, "s", 0, 0, 0, None, 0, 0)))
        assert "1 January, 00:00:00</time>; <b>metering has stopped" in page_of(client)
        broker.delete(status.STATUS_KEY)


def test_without_the_broker_it_still_loads(client, acme, member, use, settings):
    use(acme)
    settings.CACHES = {"default": settings.CACHES["default"] | {"LOCATION": "redis://127.0.0.1:1/0"}}
    assert "not known right now" in page_of(client)
