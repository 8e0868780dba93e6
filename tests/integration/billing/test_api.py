"""GET /api/usage and /api/usage/events: isolation of tenants, filters, groups and errors."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from rest_framework.test import APIClient

from billing.metering.ingest import UsageMessage, settle
from inference_worker.contract.messages import encode
from tenants.actions import do_create_api_key, do_create_tenant
from tenants.models import Tenant, User
from tests.support.rows import only_project

pytestmark = pytest.mark.django_db
USAGE, EVENTS = "/api/usage", "/api/usage/events"
NOW = datetime.now(UTC)


def store(*events):
    assert settle([UsageMessage(f"{number}-0", encode(event)) for number, event in enumerate(events)]).settled == len(
        events
    )


@pytest.fixture
def other() -> Tenant:
    return do_create_tenant("other", "Other")


def by_key(tenant: Tenant, *scopes: str) -> APIClient:
    project = only_project(tenant)
    _, secret = do_create_api_key(project, "k", scopes=scopes or ("manage",))
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


def by_session(user: User) -> APIClient:
    client = APIClient()
    client.force_login(user)
    return client


def test_usage_is_returned(acme, event):
    store(event(tenant_id=acme.pk), event(tenant_id=acme.pk), event(tenant_id=acme.pk, model="b", outcome="failed"))
    response = by_key(acme).get(USAGE)
    assert response.status_code == 200, response.json()
    answer = response.json()
    assert answer["tenant"] == "acme"
    assert answer["from"] == f"{NOW:%Y-%m}-01T00:00:00Z"
    first, second = answer["rows"]
    tokens = {"uncached": 20, "cache_read": 128, "cache_write_5m": 0, "cache_write_1h": 0, "input": 148, "output": 14}
    assert (second["model"], second["tokens"]) == ("smollm2-135m", tokens)
    assert first["requests"] == {"completed": 0, "cancelled": 0, "failed": 1}
    assert answer["total"]["requests"] == {"completed": 2, "cancelled": 0, "failed": 1}
    assert answer["total"]["tokens"] == tokens


def test_usage_groups_buckets_and_filters(acme, event):
    store(*(event(tenant_id=acme.pk, key_id=key, project_id=5) for key in (8, 8, 9)))
    client = by_key(acme)
    rows = client.get(USAGE, {"group_by": "key,project", "bucket": "day"}).json()["rows"]
    assert [(row["key_id"], row["project_id"], row["requests"]["completed"]) for row in rows] == [(8, 5, 2), (9, 5, 1)]
    assert rows[0]["start"] == f"{NOW:%Y-%m-%d}T00:00:00Z"
    assert "model" not in rows[0]
    (row,) = client.get(USAGE, {"group_by": "", "key": 9}).json()["rows"]
    assert row["requests"]["completed"] == 1
    assert client.get(USAGE, {"to": f"{NOW - timedelta(hours=2):%Y-%m-%dT%H:00:00Z}"}).json()["rows"] == []


def test_usage_by_end_user(acme, event):
    store(*(event(tenant_id=acme.pk, model=model, end_user=name) for name in ("ann", "", "ann") for model in "ab"))
    client = by_key(acme)
    rows = client.get(USAGE, {"group_by": "end_user", "bucket": "day"}).json()["rows"]
    assert [(row["end_user"], row["requests"]["completed"]) for row in rows] == [("", 2), ("ann", 4)]
    rows = client.get(USAGE, {"group_by": "model", "end_user": "ann"}).json()["rows"]
    assert [(row["model"], row["requests"]["completed"]) for row in rows] == [("a", 2), ("b", 2)]
    (row,) = client.get(USAGE, {"group_by": "", "end_user": ""}).json()["rows"]
    assert row["requests"]["completed"] == 2
    assert client.get(USAGE, {"group_by": "end_user", "format": "csv"}).status_code == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"group_by": "end_user,tier"}, "group_by"),
        ({"group_by": "miss_reason", "end_user": "ann"}, "group_by"),
        ({"group_by": "end_user", "bucket": "hour"}, "bucket"),
        ({"group_by": "end_user", "bucket": "day", "tz": "Europe/Paris"}, "bucket"),
        ({"end_user": "x" * 129}, "end_user"),
    ],
)
def test_usage_that_end_users_do_not_have_is_a_400(acme, query, param):
    response = by_key(acme).get(USAGE, query)
    assert response.status_code == 400
    assert param in response.content.decode()


def test_events_are_returned(acme, event):
    sent = event(tenant_id=acme.pk, at=NOW, queue_us=1, ttft_us=2, duration_us=3)
    store(sent)
    (found,) = by_key(acme).get(EVENTS).json()["results"]
    assert found["request_id"] == sent.billing_context.request_id
    assert found["admitted_at"] == NOW.isoformat().replace("+00:00", "Z")
    assert found["tokens"]["input"] == 74
    assert (found["queue_us"], found["ttft_us"], found["duration_us"]) == (1, 2, 3)
    assert not {"lease_id", "fencing_token", "reserved_nano", "replica_id", "tenant_id"} & set(found)


def test_events_are_paged_newest_first(acme, event):
    sent = [event(tenant_id=acme.pk, at=NOW - timedelta(seconds=number // 3)) for number in range(12)]
    store(*sent)
    client, found, url = by_key(acme), [], f"{EVENTS}?limit=5"
    while url:
        page = client.get(url).json()
        found += page["results"]
        url = page["next"]
    assert [item["request_id"] for item in found] == [
        item.billing_context.request_id
        for item in sorted(
            sent, key=lambda item: (item.billing_context.admitted_at, item.billing_context.request_id), reverse=True
        )
    ]


def test_event_filters(acme, event):
    store(
        event(tenant_id=acme.pk, request_id="r", model="a", key_id=8, project_id=5, outcome="cancelled"),
        event(tenant_id=acme.pk, at=NOW - timedelta(hours=1)),
    )
    client = by_key(acme)
    wanted = {"request_id": "r", "model": "a", "key": 8, "project": 5, "outcome": "cancelled"}
    for name, value in [*wanted.items(), ("from", (NOW - timedelta(minutes=30)).isoformat())]:
        results = client.get(EVENTS, {name: value}).json()["results"]
        assert [item["request_id"] for item in results] == ["r"], name
    results = client.get(EVENTS, {"to": (NOW - timedelta(minutes=30)).isoformat()}).json()["results"]
    assert "r" not in [item["request_id"] for item in results]
    assert len(results) == 1


@pytest.mark.parametrize("url", [USAGE, EVENTS])
def test_other_tenants_usage_is_not_visible(acme, other, event, url):
    store(event(tenant_id=other.pk, request_id="theirs"))
    client = by_key(acme)
    assert "smollm2-135m" not in client.get(url).content.decode()
    assert "smollm2-135m" not in client.get(url, {"key": 3}).content.decode()
    assert client.get(url, {"tenant": "other"}).status_code == 404
    member = User.objects.create_user("member@example.com")
    assert by_session(member).get(url, {"tenant": "other"}).status_code == 404
    assert by_session(member).get(url).status_code == 400


@pytest.mark.parametrize("url", [USAGE, EVENTS])
def test_an_operator_names_the_tenant(acme, other, event, url):
    store(event(tenant_id=other.pk))
    client = by_session(User.objects.create_superuser("op@example.com"))
    assert "smollm2-135m" in client.get(url, {"tenant": "other"}).content.decode()
    assert "smollm2-135m" not in client.get(url, {"tenant": "acme"}).content.decode()
    assert client.get(url, {"tenant": "unknown"}).status_code == 404


@pytest.mark.parametrize("url", [USAGE, EVENTS])
def test_callers_without_the_permission_are_rejected(acme, url):
    assert APIClient().get(url).status_code == 401
    assert by_key(acme, "inference").get(url).status_code == 403
    assert by_key(acme).post(url, {}).status_code == 405


@pytest.mark.parametrize(
    ("url", "name", "value"),
    [
        (USAGE, "group_by", "color"),
        (USAGE, "bucket", "minute"),
        (USAGE, "tz", "Mars/Olympus_Mons"),
        (USAGE, "tz", "../UTC"),
        (USAGE, "from", "yesterday"),
        (USAGE, "from", "2026-02-30"),
        (USAGE, "to", "0001-01-01"),
        (USAGE, "from", "2199-01-01"),
        (USAGE, "key", "all"),
        (USAGE, "key", "9" * 30),
        (USAGE, "model", "nul\x00"),
        (USAGE, "modle", "a"),
        (USAGE, "outcome", "failed"),
        (EVENTS, "outcome", "splendid"),
        (EVENTS, "limit", "0"),
        (EVENTS, "limit", "1000000"),
        (EVENTS, "cursor", "made-up"),
        (EVENTS, "cursor", "cD1ub3doZW4="),  # well-formed, but its position is not a time
        (EVENTS, "request_id", "r" * 65),
        (EVENTS, "group_by", "model"),
    ],
)
def test_invalid_parameters_are_rejected(acme, url, name, value):
    response = by_key(acme).get(url, {name: value})
    assert response.status_code == 400
    assert response["content-type"] == "application/problem+json"
    assert list(response.json()["errors"]) == [name]


def test_usage_in_a_time_zone(acme, event):
    zone = ZoneInfo("America/New_York")
    night = datetime.now(zone).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    store(event(tenant_id=acme.pk, at=night), event(tenant_id=acme.pk, at=night - timedelta(microseconds=1)))
    client, asked = by_key(acme), {"tz": "America/New_York", "from": f"{night:%Y-%m-%d}", "group_by": ""}
    local_usage = client.get(USAGE, {**asked, "bucket": "day"}).json()
    assert (local_usage["tz"], local_usage["from"]) == (
        "America/New_York",
        night.astimezone(UTC).isoformat().replace("+00:00", "Z"),
    )
    assert [(row["start"], row["requests"]["completed"]) for row in local_usage["rows"]] == [(night.isoformat(), 1)]
    (month,) = client.get(USAGE, {**asked, "bucket": "month"}).json()["rows"]
    assert month["start"] == night.replace(day=1).isoformat()
    response = client.get(USAGE, {**asked, "tz": "Asia/Kolkata", "bucket": "hour"})
    assert (response.status_code, list(response.json()["errors"])) == (400, ["tz"])
    assert client.get(USAGE, {**asked, "tz": "Asia/Kolkata"}).status_code == 200  # without buckets


def test_too_many_rows_are_rejected(acme, event, monkeypatch):
    monkeypatch.setattr("billing.metering.usage.MAX_ROWS", 1)
    store(event(tenant_id=acme.pk, model="a"), event(tenant_id=acme.pk, model="b"))
    response = by_key(acme).get(USAGE)
    assert response.status_code == 400
    assert "less time" in response.json()["errors"]["group_by"][0]
