"""Actions of budgets, and their API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from billing.budgets.budgets import do_change_budget, do_make_budget, do_remove_budget
from billing.models import Budget, BudgetPeriod
from tenants import actions
from tenants.actions.common import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, ChangeEventRow, Tenant, User
from tests.support.rows import of, only_project, unscoped

pytestmark = pytest.mark.django_db
SOON = datetime.now(UTC) + timedelta(days=2)


@pytest.fixture
def tenant() -> Tenant:
    return actions.do_create_tenant("acme", "Acme")


def make(tenant: Tenant, **fields: object) -> Budget:
    return do_make_budget(tenant, **{"name": "b", "unit": "money", "period": "month", "amount": 10**9, **fields})


def test_each_change_is_audited_and_published(tenant):
    changes = unscoped(ChangeEventRow).count()
    budget = make(tenant)
    assert do_change_budget(budget, amount=5, temporary_increase=3, increase_expires_at=SOON).amount == 5
    assert do_remove_budget(budget)
    assert not do_remove_budget(budget)
    with pytest.raises(Conflict):
        do_change_budget(budget, amount=6)
    verbs = [each.action for each in sorted(of(AuditEntry, tenant, object_type="budget"), key=lambda entry: entry.pk)]
    assert verbs == ["budget.created", "budget.updated", "budget.deleted"]
    assert unscoped(ChangeEventRow).count() == changes + 3


@pytest.mark.parametrize(
    "fields",
    [
        {"amount": -1},
        {"temporary_increase": 5},
        {"increase_expires_at": SOON},
        {"period": "lifetime", "rollover_limit": 5},
        {"unit": "requests", "reduce_max_tokens": True},
        {"unit": "apples"},
        {"period": "year"},
        {"mode": "maybe"},
    ],
)
def test_invalid_budgets_are_rejected(tenant, fields):
    with pytest.raises(ActionRefused):
        make(tenant, **fields)
    assert unscoped(Budget).count() == 0


def test_other_tenants_projects_keys_and_users_are_rejected(tenant):
    other = actions.do_create_tenant("other", "Other")
    key, _ = actions.do_create_api_key(only_project(other), "k")
    stranger = User.objects.create_user("x@example.com")
    mine, _ = actions.do_create_api_key(only_project(tenant), "k")
    for scope in (
        {"project": only_project(other)},
        {"key": key},
        {"member": stranger},
        {"project": only_project(tenant), "key": mine},
    ):
        with pytest.raises(ActionRefused):
            make(tenant, **scope)


def test_the_unit_and_the_period_cannot_change(tenant):
    with pytest.raises(ActionRefused, match="unit"):
        do_change_budget(make(tenant), unit="tokens")


@pytest.mark.parametrize("unit", ["money", "tokens", "requests"])
def test_an_amount_above_the_largest_is_refused(tenant, client, unit):
    _, secret = actions.do_create_api_key(only_project(tenant), "m", scopes=["manage"])
    headers = {"authorization": f"Bearer {secret}"}
    given = {"name": "b", "unit": unit, "period": "month"}
    for more in (1, 2**63 - 10**17, 2**63 - 10**17 + 1, 10**30):
        too_large = client.post("/api/budgets", given | {"amount": 10**17 + more}, "application/json", headers=headers)
        assert too_large.status_code == 400
        assert list(too_large.json()["errors"]) == ["amount"]
    made = client.post("/api/budgets", given | {"amount": 10**17}, "application/json", headers=headers)
    assert (made.status_code, made.json()["amount"]) == (201, 10**17)
    for name in ("amount", "temporary_increase", "rollover_limit"):
        change = {name: 10**17 + 1, "increase_expires_at": SOON.isoformat()}
        response = client.patch(f"/api/budgets/{made.json()['id']}", change, "application/json", headers=headers)
        assert (response.status_code, list(response.json()["errors"])) == (400, [name])
        with pytest.raises(ActionRefused, match="The largest amount of a budget is 100,000,000,000,000,000"):
            do_change_budget(unscoped(Budget).get(), **{name: 10**17 + 1})
    assert unscoped(Budget).get().amount == 10**17


def test_the_api_returns_the_remaining_amount(tenant, client):
    _, secret = actions.do_create_api_key(only_project(tenant), "m", scopes=["manage"])
    headers = {"authorization": f"Bearer {secret}"}
    sent = {"name": "Monthly", "unit": "money", "period": "month", "amount": 1000}
    made = client.post("/api/budgets", sent, content_type="application/json", headers=headers)
    assert made.status_code == 201, made.content
    assert made.json()["budget_period"] is None
    pk, now = made.json()["id"], datetime.now(UTC)
    with all_tenants_scope(BypassReason.COMMAND):
        BudgetPeriod.objects.create(
            tenant_id=tenant.pk,
            budget_id=pk,
            unit="money",
            period_start=now - timedelta(days=1),
            period_end=now + timedelta(days=1),
            used=100_000_001,
            reserved=50,
        )
    budget_period = client.get(f"/api/budgets/{pk}", headers=headers).json()["budget_period"]
    assert (budget_period["used"], budget_period["reserved"], budget_period["left"]) == (101, 50, 849)
    raised = {"temporary_increase": 10, "increase_expires_at": SOON.isoformat()}
    response = client.patch(f"/api/budgets/{pk}", raised, content_type="application/json", headers=headers)
    assert response.json()["budget_period"]["left"] == 859
    assert [row["id"] for row in client.get("/api/budgets?unit=money", headers=headers).json()["results"]] == [pk]
    assert client.get("/api/budgets?unit=tokens", headers=headers).json()["results"] == []
    assert client.delete(f"/api/budgets/{pk}", headers=headers).status_code == 204
    assert client.get("/api/budgets?active=false", headers=headers).json()["results"][0]["active"] is False
