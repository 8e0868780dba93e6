"""What every list offers: exports of what is shown, a choice of columns, and saved views."""

from __future__ import annotations

import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing.budgets.budgets import do_make_budget
from billing.models import BudgetAlert, BudgetPeriod
from millrace.apps.batches.models import Batch, File
from tenants import actions
from tenants.actions import webhooks
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import ApiKey, SavedView, Tenant, User

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="owner")]
TENANT = ("requests", "keys", "batches", "invoices", "audit", "webhooks", "members")
OPERATOR = ("tenants", "users", "billing", "audit")


@pytest.fixture
def project(acme: Tenant) -> Any:
    return actions.do_create_project(acme, "search", "Search")


def key(project: Any, name: str) -> ApiKey:
    return actions.do_create_api_key(project, name)[0]


def exported(client: Any, path: str) -> list[dict[str, str]]:
    response = client.get(path)
    assert response.status_code == 200, path
    assert response.headers["Content-Type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(response.content.decode())))


def batch(tenant: Tenant, project: Any, name: str, status: str, **fields: Any) -> Batch:
    with tenant_scope(tenant):
        row: Batch = Batch.objects.create(
            tenant_id=tenant.pk,
            project_id=project.pk,
            key_id=1,
            name=name,
            status=status,
            dialect="openai",
            input_file="file-1",
            endpoint="/v1/chat/completions",
            expires_at=datetime.now(UTC) + timedelta(days=1),
            **fields,
        )
    return row


def test_the_export_of_keys_has_what_the_page_shows(client, acme, project):
    other = actions.do_create_project(acme, "other", "Other")
    for name in ("one", "two"):
        key(project, name)
    gone = key(other, "gone")
    actions.do_revoke_api_key(gone)
    assert [row["name"] for row in exported(client, "/t/acme/keys/export")] == ["two", "one"]
    assert [row["name"] for row in exported(client, "/t/acme/keys/export?q=tw")] == ["two"]
    (row,) = exported(client, f"/t/acme/keys/export?show=ended&project={other.pk}")
    assert (row["name"], row["project"], row["spend_this_month"]) == ("gone", "other", "0.00")
    assert datetime.fromisoformat(row["revoked_at"]).tzinfo is not None
    page = client.get("/t/acme/keys/?q=tw&columns=used").content.decode()
    assert "/t/acme/keys/export?q=tw&amp;columns=used&amp;format=json" in page
    found = json.loads(client.get("/t/acme/keys/export?q=tw&format=json").content)
    assert [row["name"] for row in found] == ["two"]


def test_a_secret_is_in_no_export(client, acme, project):
    row, secret = actions.do_create_api_key(project, "one")
    text = client.get("/t/acme/keys/export").content.decode()
    assert row.prefix in text and secret not in text and row.key_hash.hex() not in text


def test_batches_are_exported_with_their_counts(client, acme, project):
    batch(acme, project, "batch_1", "completed", total=3, succeeded=2, errored=1)
    batch(acme, project, "batch_2", "failed")
    done, failed = sorted(exported(client, "/t/acme/batches/export"), key=lambda row: row["id"])
    assert [done[name] for name in ("status", "requests", "succeeded", "failed")] == ["completed", "3", "2", "1"]
    assert failed["status"] == "failed"
    assert [row["id"] for row in exported(client, "/t/acme/batches/export?status=failed")] == ["batch_2"]


def test_deliveries_are_exported(client, acme):
    endpoint = webhooks.do_create_endpoint(acme, "https://example.com/hook")[0]
    webhooks.do_send_test_event(endpoint)
    (row,) = exported(client, "/t/acme/webhooks/export?state=pending")
    assert (row["event"], row["url"], row["attempts"]) == ("webhook.test", "https://example.com/hook", "0")
    assert exported(client, "/t/acme/webhooks/export?state=failed") == []


def test_members_are_exported(client, acme):
    other = User.objects.create_user("dev@example.com", name="=Dev")
    actions.do_add_member(acme, other, "developer")
    dev, owner = exported(client, "/t/acme/members/export")
    assert (dev["email"], dev["name"], dev["role"], dev["two_factor"]) == (
        "dev@example.com",
        "'=Dev",
        "developer",
        "no",
    )
    assert owner["role"] == "owner" and datetime.fromisoformat(owner["member_since"]).tzinfo is not None
    assert [row["email"] for row in exported(client, "/t/acme/members/export?role=owner")] == ["owner@example.com"]
    page = client.get("/t/acme/members/?role=developer&columns=since").content.decode()
    assert "dev@example.com" in page and "Last sign-in" not in page[page.index("<table") : page.index("</table>")]


def test_files_are_exported_without_expired_ones(client, acme, project):
    with tenant_scope(acme):
        for name, days in (("file-1", 1), ("file-2", -1)):
            File.objects.create(
                tenant_id=acme.pk,
                project_id=project.pk,
                name=name,
                filename="night.jsonl",
                purpose=File.Purpose.BATCH,
                size=12,
                expires_at=datetime.now(UTC) + timedelta(days=days),
            )
    (row,) = exported(client, "/t/acme/files/export")
    assert (row["id"], row["filename"], row["purpose"], row["bytes"]) == ("file-1", "night.jsonl", "batch", "12")
    assert "/t/acme/files/export?format=json" in client.get("/t/acme/batches/").content.decode()


def test_alerts_are_exported_with_the_filters(client, acme):
    budget = do_make_budget(acme, name="Cap", unit="money", period="month", amount=10)
    with all_tenants_scope(BypassReason.COMMAND):
        period = BudgetPeriod.objects.create(
            tenant_id=acme.pk, budget_id=budget.pk, unit="money", period_start=datetime.now(UTC)
        )
        for threshold, at in (("80", None), ("100", datetime.now(UTC))):
            BudgetAlert.objects.create(
                tenant=acme,
                budget=budget,
                budget_period=period,
                threshold=threshold,
                used=9,
                limit=10,
                acknowledged_at=at,
            )
    assert [row["threshold"] for row in exported(client, "/t/acme/alerts/export")] == ["100", "80"]
    (row,) = exported(client, "/t/acme/alerts/export?state=open")
    assert [row[name] for name in ("budget", "unit", "used", "limit", "acknowledged_at")] == [
        "Cap",
        "money",
        "9",
        "10",
        "",
    ]
    page = client.get("/t/acme/alerts/?state=open")
    assert [label for label, _ in page.context["export_urls"]] == ["CSV", "JSON"]
    assert [view.current for view in page.context["views"].tabs] == [False, True]


@pytest.mark.parametrize("screen", TENANT)
def test_every_list_has_columns_exports_and_views(client, acme, screen):
    response = client.get(f"/t/acme/{screen}/")
    assert response.status_code == 200
    context = response.context
    assert len(context["column_choices"]) > 1 and all(choice.url for choice in context["column_choices"])
    assert [label for label, _ in context["export_urls"]] == ["CSV", "JSON"]
    for _, url in context["export_urls"]:
        assert client.get(url).status_code == 200
    first = context["views"].tabs[0]
    assert first.current

    sent = {"name": "Mine", "query": "columns=x&cursor=1"}
    assert client.post(f"/t/acme/{screen}/views/save", sent).url == f"/t/acme/{screen}/?columns=x"
    with tenant_scope(acme):
        view = SavedView.objects.for_tenant(acme).get(screen=screen)
    assert "Mine" in client.get(f"/t/acme/{screen}/").content.decode()
    client.post(f"/t/acme/{screen}/views/delete", {"view": view.pk})
    assert "Mine" not in client.get(f"/t/acme/{screen}/").content.decode()


@pytest.mark.parametrize("screen", TENANT)
def test_an_export_needs_the_permission_of_its_list(client, acme, screen):
    user = User.objects.create_user("billing@example.com")
    actions.do_add_member(acme, user, "billing")
    client.force_login(user)
    list_status = client.get(f"/t/acme/{screen}/").status_code
    assert client.get(f"/t/acme/{screen}/export").status_code == list_status
    assert client.post(f"/t/acme/{screen}/views/save", {"name": "a"}).status_code in (403, 303)
    assert (client.get(f"/t/acme/{screen}/export").status_code == 403) == (list_status == 403)


def test_columns_are_hidden_and_shown(client, acme, project):
    row = key(project, "one")
    page = client.get("/t/acme/keys/").content.decode()
    assert re.findall(r'<th scope="col"[^>]*>([^<]+)', page)[:3] == ["Key", "Project, owner", "Permissions"]
    page = client.get("/t/acme/keys/?columns=status").content.decode()
    table = page[page.index("<table") : page.index("</table>")]
    assert re.findall(r'<th scope="col"[^>]*>([^<]+)', table) == ["Key", "Status"]
    assert row.name in table and table.count("<td") == 1

    batch(acme, project, "batch_1", "completed", completed_at=datetime(2026, 5, 4, 12, tzinfo=UTC))
    assert "4 May" not in client.get("/t/acme/batches/").content.decode()
    assert "4 May" in client.get("/t/acme/batches/?columns=completed").content.decode()
    page = client.get("/t/acme/audit/?columns=request").content.decode()
    assert re.findall(r'<th scope="col"[^>]*>([^<]+)', page) == ["Action", "Request ID"]


@pytest.mark.parametrize("screen", OPERATOR)
def test_lists_of_operators_are_exported(client, acme, screen):
    client.force_login(User.objects.create_superuser("operator@example.com"))
    response = client.get(f"/operator/{screen}/")
    assert response.status_code == 200 and "views" not in response.context
    for _, url in response.context["export_urls"]:
        answer = client.get(url)
        assert answer.status_code == 200
        assert f'filename="{screen}-' in answer.headers["Content-Disposition"]


def test_the_operator_exports_what_is_shown(client, acme):
    actions.do_create_tenant("other", "Other")
    client.force_login(User.objects.create_superuser("operator@example.com"))
    assert [row["tenant"] for row in exported(client, "/operator/tenants/export?q=acm")] == ["acme"]
    (row,) = exported(client, "/operator/users/export?q=owner")
    assert (row["email"], row["tenants"], row["two_factor"]) == ("owner@example.com", "acme", "no")
    assert {row["email"] for row in exported(client, "/operator/users/export?show=operators")} == {
        "operator@example.com"
    }


def test_an_export_is_in_english(client, acme, project):
    key(project, "one")
    english = client.get("/t/acme/keys/export").content
    assert client.get("/t/acme/keys/export", headers={"accept-language": "de"}).content == english
