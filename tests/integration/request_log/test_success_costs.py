"""Successful requests and the cost per success, by group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from millrace.apps.experiments.success import feedback_of, find_retried, has_succeeded
from millrace.apps.request_log.models import RequestRecord
from millrace.apps.request_log.success_costs import SUCCESS_GROUPS, SuccessCosts, success_costs
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant
from tests.support.request_log.records import END, NOW, START, give_feedback, record, settle
from tests.support.tenants.management_api import by_key

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


def make_requests(tenant: Tenant) -> None:
    """Create one request of each kind. Each is settled with a cost of 1 femto-USD."""
    kinds: list[dict[str, Any]] = [
        {},
        {"failure": "schema", "served_model": "beta"},
        {"failure": "tool", "cache_layer": "prefix"},
        {"outcome": "cancelled", "end_user": "ann"},
        {"outcome": "failed"},
        {"outcome": "refused"},
        {"outcome": "limited"},  # never tried
        {"replay_of": "req_000"},  # the response of another request
        {"failure": "schema"},  # feedback reports a success
        {},  # feedback reports a failure
        {},  # feedback with a good score
        {},  # feedback with only a label
        {"route": {"policy": {"version": 3}}, "key_id": 7, "project_id": 8},
    ]
    for number, changes in enumerate(kinds):
        record(tenant, number, **changes)
        if changes.get("outcome") != "limited" and "replay_of" not in changes:
            settle(tenant, f"req_{number:03}", uncached=1)
    give_feedback(tenant, 8, success=True)
    give_feedback(tenant, 9, success=False, score=0.9)
    give_feedback(tenant, 10, score=0.5)
    give_feedback(tenant, 11, label="short")
    record(tenant, 20, retry_key=5)
    again = {"retry_key": 5, "started_at": NOW - timedelta(minutes=19), "request_id": "req_again"}
    record(tenant, 21, **again)
    record(tenant, 22, retry_key=6)
    late = {"retry_key": 6, "started_at": NOW - timedelta(minutes=19, seconds=59), "request_id": "req_late"}
    record(tenant, 23, **late)


def groups(tenant: Tenant, group: Any = "model", **filters: Any) -> dict[str, SuccessCosts]:
    with tenant_scope(tenant):
        return {row.name: row for row in success_costs(tenant.pk, START, END, group, **filters)}


def test_each_sign_is_counted_and_the_first_that_applies_decides(acme: Tenant) -> None:
    make_requests(acme)
    settle(acme, "req_000.1", uncached=1)  # another prompt of the first request
    found = groups(acme)
    assert found["beta"] == SuccessCosts("beta", 1, 0, schema_failures=1, cost_femto=1)
    assert found["beta"].cost_per_success_femto is None
    alpha = found["alpha"]
    assert (alpha.requests, alpha.succeeded, alpha.cost_femto) == (14, 8, 11)
    assert (alpha.feedback, alpha.bad_feedback, alpha.schema_failures, alpha.tool_failures) == (3, 1, 1, 1)
    assert (alpha.retried, alpha.cancelled, alpha.errors) == (1, 1, 2)
    assert alpha.cost_per_success_femto == 2  # 11 / 8, rounded up
    assert alpha.success_rate == 8 / 14


def test_the_sums_are_those_of_single_requests(acme: Tenant) -> None:
    """The statement and the function that experiments use decide equally."""
    make_requests(acme)
    with tenant_scope(acme):
        rows = list(RequestRecord.objects.for_tenant(acme).filter(replay_of=""))
        feedback, again = feedback_of(acme.pk, [row.request_id for row in rows]), find_retried(acme.pk, rows)
    decided = [has_succeeded(row, feedback.get(row.request_id), was_retried=row.request_id in again) for row in rows]
    found = groups(acme).values()
    assert sum(row.succeeded for row in found) == decided.count(True) > 0
    assert sum(row.requests for row in found) == len(decided) - decided.count(None)


def test_groups_and_filters(acme: Tenant) -> None:
    make_requests(acme)
    names = {group: set(groups(acme, group)) for group in SUCCESS_GROUPS}
    assert names == {
        "model": {"alpha", "beta"},
        "policy": {"", "mine v3"},
        "cache_layer": {"", "prefix"},
        "key": {"1", "7"},
        "end_user": {"", "ann"},
    }
    assert all(sum(row.requests for row in groups(acme, group).values()) == 15 for group in SUCCESS_GROUPS)
    assert groups(acme, "key", key_id=7)["7"].requests == groups(acme, "policy", project_id=8)["mine v3"].requests == 1
    assert set(groups(acme, "model", model="beta")) == {"beta"}


def test_other_tenants_are_not_counted(acme: Tenant) -> None:
    other = actions.do_create_tenant("other", "Other")
    make_requests(acme)
    record(other, 0)
    give_feedback(acme, 0, success=False)
    assert groups(other)["alpha"] == SuccessCosts("alpha", 1, 1)
    with tenant_scope(other):  # also by row-level security
        assert success_costs(acme.pk, START, END, "model") == []


def test_api(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    make_requests(acme)
    client = by_key(acme)
    query: dict[str, Any] = {"from": START.isoformat(), "to": END.isoformat(), "group_by": "end_user"}
    body = client.get("/api/requests/success", query).json()
    ann = {"name": "ann", "requests": 1, "succeeded": 0, "cancelled": 1, "usd_per_success": None, "success_rate": 0.0}
    assert next(row for row in body["groups"] if row["name"] == "ann").items() >= ann.items()
    total = {"requests": 15, "succeeded": 8, "usd": "0.000000000000011", "usd_per_success": "0.000000000000002"}
    assert body["total"].items() >= total.items()
    for wrong in ({"group_by": "x"}, {"model": "\0"}, {"from": "2020-01-01T00:00:00Z"}):
        assert client.get("/api/requests/success", query | wrong).status_code == 400
    monkeypatch.setattr("millrace.apps.request_log.success_costs.MAX_GROUPS", 1)
    response = client.get("/api/requests/success", query)
    assert (response.status_code, "too many groups" in response.content.decode()) == (400, True)
