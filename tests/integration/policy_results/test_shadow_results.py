"""Results of shadows: sums by pair of models, for the tenant only, in the API and on the page of the policy."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.test import Client

from millrace.apps.policy_results.models import ShadowComparison
from millrace.apps.policy_results.shadow_results import shadow_results
from millrace.apps.request_log import tasks
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant, User
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_key

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("all_models_served")]
NOW = datetime.now(UTC)
PERIOD = NOW - timedelta(hours=1), NOW + timedelta(hours=1)
URL = "/api/policies/shadow-results"


def compare(tenant: Tenant, number: int, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "tenant_id": tenant.pk,
        "started_at": NOW - timedelta(seconds=number),
        "request_id": f"req_{number:03}",
        "requested_model": "mine",
        "policy_version": 1,
        "served_model": "small",
        "shadow_model": "large",
        "is_operator_paid": False,
        "code": "",
        "has_schema": False,
        "failure": "",
        "shadow_failure": "",
        "output_tokens": 10,
        "shadow_output_tokens": 30,
        "cost_femto": 2 * 10**15,
        "shadow_cost_femto": 3 * 10**15,
        "ttft_ms": 100 + number,
        "shadow_ttft_ms": 200 + number,
        "total_ms": 1000,
        "shadow_total_ms": 1500,
    }
    fields |= changes
    with tenant_scope(tenant):
        ShadowComparison.objects.create(**fields)


@pytest.fixture
def compared(acme: Tenant) -> Tenant:
    other = actions.do_create_tenant("other", "Other")
    for number in range(10):
        compare(acme, number)
    compare(acme, 10, has_schema=True, failure="schema")
    compare(acme, 11, has_schema=True, shadow_failure="empty")
    compare(acme, 12, cost_femto=None)
    missing = dict.fromkeys(("shadow_output_tokens", "shadow_cost_femto", "shadow_ttft_ms", "shadow_total_ms"))
    compare(acme, 13, code="budget_exceeded", failure="empty", **missing)
    compare(acme, 14, shadow_model="larger", is_operator_paid=True)
    compare(acme, 15, requested_model="another")
    compare(acme, 16, started_at=NOW - timedelta(days=8))
    compare(other, 17)
    return acme


def test_answers_are_compared_with_those_of_their_shadows(compared: Tenant) -> None:
    with tenant_scope(compared):
        result, paid = shadow_results(compared.pk, "mine", *PERIOD)
    assert (result.requests, result.compared, result.with_schema, result.priced) == (14, 13, 2, 12)
    live, shadow = result.answered, result.shadow
    assert (live.model, shadow.model) == ("small", "large")
    assert (live.valid_schemas, shadow.valid_schemas) == (1, 2)
    assert (live.passed, shadow.passed) == (12, 12)
    assert (live.output_tokens, shadow.output_tokens) == (130, 390)
    assert (live.cost_femto, shadow.cost_femto) == (24 * 10**15, 36 * 10**15)
    assert (live.ttft_p50_ms, live.ttft_p95_ms, shadow.ttft_p50_ms) == (106, 112, 206)
    assert (live.total_p95_ms, shadow.total_p95_ms) == (1000, 1500)
    assert result.codes == {"budget_exceeded": 1}
    assert (paid.requests, paid.operator_paid, paid.shadow.model) == (1, 1, "larger")


def test_the_api_returns_the_results_of_the_tenant(compared: Tenant) -> None:
    client = by_key(compared)
    result, _ = client.get(URL, {"name": "mine"}).json()
    assert (result["compared"], result["answered"]["usd"], result["shadow"]["usd"]) == (13, "24.00", "36.00")
    assert result["not_answered"] == [{"code": "budget_exceeded", "requests": 1}]
    assert client.get(URL, {"name": "none"}).json() == []
    assert client.get(URL).status_code == 400
    other = by_key(unscoped(Tenant).get(slug="other"))
    (theirs,) = other.get(URL, {"name": "mine"}).json()
    assert theirs["requests"] == 1


def test_the_page_of_the_policy_shows_the_results(client: Client, compared: Tenant) -> None:
    owner = User.objects.create_user("owner@example.com")
    actions.do_add_member(compared, owner, "owner")
    body = {"rules": [{"targets": [{"model": "small"}]}], "shadow": {"model": "large", "percent": 20}}
    policy = actions.do_publish_policy(compared, "mine", body)
    client.force_login(owner)
    page = client.get(f"/t/acme/routing/{policy.pk}").content.decode()
    for text in (
        "large also answers 20% of the requests",
        "13 of 14 requests compared",
        "Valid under the schema",
        "+50.0 points",
        "+200.0%",
        "$36.00",
        "1 budget exceeded",
        "They are not billed to you",
    ):
        assert text in page, text


def test_comparisons_expire_with_the_request_log(compared: Tenant) -> None:
    days = settings.MILLRACE.request_log_retention_days
    tasks.purge_expired(NOW + timedelta(days=days) - timedelta(seconds=5))
    assert {row.request_id for row in unscoped(ShadowComparison).all()} == {f"req_{n:03}" for n in range(6)}
