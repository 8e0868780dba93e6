"""The client against the management API: each resource of a tenant, and those of operators."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from millrace import client as m
from millrace.cli.profiles import Connection
from tests.support.billing.books import rate_card

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("all_models_served")]


@pytest.fixture
def client(connect, key_connection) -> Iterator[m.Client]:
    with connect(key_connection) as client:
        yield client


@pytest.fixture
def operator(connect, operator_connection) -> Iterator[m.Client]:
    with connect(operator_connection) as client:
        yield client


def test_keys(client):
    made = client.keys.create(name="ci", scopes=["inference"])
    assert made["secret"].startswith("sk-")
    assert client.keys.update(made["id"], name="build")["name"] == "build"
    successor = client.keys.rotate(made["id"], overlap_hours=1)
    assert successor["replaces_id"] == made["id"]
    client.keys.revoke(successor["id"])
    assert client.keys.get(successor["id"])["live"] is False
    assert made["id"] in [key["id"] for key in client.keys.list(live=True, page_size=1)]
    assert successor["id"] not in [key["id"] for key in client.keys.list(live=True)]


def test_creation_is_executed_once_per_idempotency_key(client):
    first = client.keys.create(name="once", idempotency_key="order-1")
    assert client.keys.create(name="once", idempotency_key="order-1") == first
    assert len([key for key in client.keys.list() if key["name"] == "once"]) == 1
    with pytest.raises(m.ConflictError):
        client.keys.create(name="other", idempotency_key="order-1")


def test_pages(client):
    names = [client.projects.create(name=f"project {n}")["id"] for n in range(5)]
    assert [project["id"] for project in client.projects.list(page_size=2)][:5] == names[::-1]
    assert next(len(page) for page in client.projects.list(page_size=3).pages()) == 3


def test_projects_and_tenant(client):
    project = client.projects.create(name="New", slug="new")
    assert client.projects.update(project["id"], name="Newer")["name"] == "Newer"
    assert [row["slug"] for row in client.projects.list(slug="new")] == ["new"]
    client.projects.delete(project["id"])
    with pytest.raises(m.NotFound):
        client.projects.get(project["id"])
    assert client.tenant.get()["slug"] == "acme"
    assert client.tenant.update(content_retention_days=0)["content_retention_days"] == 0


def test_budgets(client, furnished_acme):
    budget = client.budgets.create(name="March", unit="money", period="month", amount=5_000_000_000, thresholds=[50])
    assert client.budgets.update(budget["id"], amount=7_000_000_000)["amount"] == 7_000_000_000
    assert budget["id"] in [row["id"] for row in client.budgets.list(unit="money", active=True)]
    assert list(client.budgets.alerts(budget["id"])) == []
    assert client.budgets.forecast(budget["id"])["path"] == []  # no usage yet
    client.budgets.delete(budget["id"])
    assert client.budgets.get(budget["id"])["active"] is False
    assert list(client.alerts.list()) == []
    assert "path" in client.forecast.get()


def test_limits_and_policies(client, furnished_acme):
    limits = client.limits.set(requests_per_minute=60, key_id=int(furnished_acme.ids["api-key"]))
    assert client.limits.get(limits["id"])["requests_per_minute"] == 60
    client.limits.delete(limits["id"])
    assert limits["id"] not in [row["id"] for row in client.limits.list()]
    policy = client.policies.publish(name="quick", body={"models": ["smollm2-135m"]})
    again = client.policies.revert(policy["id"])
    assert again["version"] == policy["version"] + 1
    client.policies.withdraw(again["id"])
    assert [row["active"] for row in client.policies.list(name="quick")] == [False, False]


def test_members_and_invitations(client):
    developer = next(iter(client.members.list(role="developer")))
    assert client.members.update(developer["id"], role="readonly")["role"] == "readonly"
    client.members.delete(developer["id"])
    with pytest.raises(m.NotFound):
        client.members.get(developer["id"])
    invitation = client.invitations.create(email="new@acme.example", role="admin")
    client.invitations.revoke(invitation["id"])
    assert client.invitations.get(invitation["id"])["open"] is False


def test_webhooks(client, furnished_acme):
    ids = furnished_acme.ids
    endpoint = client.webhooks.get(int(ids["api-webhook"]))
    assert client.webhooks.update(endpoint["id"], active=False)["active"] is False
    assert client.webhooks.update(endpoint["id"], active=True)["active"] is True
    assert client.webhooks.rotate(endpoint["id"])["secret"].startswith("whsec_")
    delivery = client.webhooks.test(endpoint["id"])
    assert delivery["id"] in [row["id"] for row in client.webhook_deliveries.list(endpoint=endpoint["id"])]
    assert client.webhook_events.get(delivery["event_id"])["event_type"] == "webhook.test"
    client.webhooks.delete(endpoint["id"])
    assert endpoint["id"] not in [row["id"] for row in client.webhooks.list()]


def test_usage_requests_and_audit(client, furnished_acme):
    usage = client.usage.get(group_by="model,key", bucket="day", from_=datetime(2026, 1, 1, tzinfo=UTC))
    assert usage["rows"] == []
    assert list(client.usage.events()) == []
    assert [row["request_id"] for row in client.requests.list()] == ["req_of_acme"]
    assert client.requests.get("req_of_acme")["request_id"] == "req_of_acme"
    assert client.requests.rates()["total"]["requests"] == 1
    assert next(iter(client.audit.list(object_type="project")))["action"].startswith("project.")


def test_invoices_and_money(client, furnished_acme):
    invoice = next(iter(client.invoices.list(state="draft")))
    assert client.invoices.get(invoice["id"])["state"] == "draft"
    assert list(client.invoices.events(invoice["id"])) == []
    for rows in (client.credits, client.commitments):
        assert list(rows.list()) == []
    (payment,) = client.payments.list()
    assert payment["cents"] == 100
    assert {row["account"] for row in client.ledger.list()} == {"cash", "deposits"}
    with pytest.raises(m.PermissionDenied):  # a key may not change the billing profile
        client.billing_profile.update(city="Paris")
    assert client.billing_profile.get()["entity"]


def test_prices(client):
    rate_card()
    assert {price["component"] for price in client.prices.list()} >= {"uncached", "output"}


def test_operator(operator, furnished_acme):
    made = operator.operator.tenants.create(slug="beta", name="Beta")
    assert operator.operator.tenants.suspend(made["id"])["status"] == "suspended"
    assert operator.operator.tenants.resume(made["id"])["status"] == "active"
    assert [row["slug"] for row in operator.operator.tenants.list(search="eta")] == ["beta"]
    assert operator.operator.reconciliation.get()["is_late"] in (True, False)
    assert next(iter(operator.operator.users.list(is_operator=True)))["email"] == "op@example.com"
    assert operator.operator.models.list()
    assert list(operator.operator.prices.list(state="draft")) == []
    period = next(iter(operator.operator.periods.list()))
    drafts = operator.operator.tenants.draft_invoices(furnished_acme.tenant.pk, month=period["label"])
    assert all(invoice["state"] == "draft" for invoice in drafts)


def test_errors(client, connect, key_connection):
    with pytest.raises(m.InvalidRequest, match="amount") as caught:
        client.budgets.create(name="b", unit="money", period="month", amount=-1)
    assert set(caught.value.errors) == {"amount"}
    wrong = Connection(key_connection.url, "sk-mr-wrong")
    with connect(wrong) as other, pytest.raises(m.AuthenticationFailed):
        other.tenant.get()
    with pytest.raises(m.AuthenticationFailed):
        list(client.operator.tenants.list())
