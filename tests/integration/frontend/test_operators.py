"""Django's admin, if it is enabled, and the users who cannot see it."""

from __future__ import annotations

import pytest
from allauth.mfa.models import Authenticator
from drf_spectacular.generators import SchemaGenerator

from billing.budgets.budgets import do_make_budget
from billing.models import Budget
from tenants import actions
from tenants.models import AuditEntry, User
from tests.support.rows import only_project, unscoped
from tools.openapi.formatting import read_yaml

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.urls("tests.support.frontend.admin_urls"),
]  # with MILLRACE_DJANGO_ADMIN


@pytest.fixture
def operator(client) -> User:
    user = User.objects.create_superuser("op@example.com")
    client.force_login(user)
    return user


def test_users_who_are_not_operators_are_rejected(client):
    assert client.get("/operator/tenants/").url == "/login?next=/operator/tenants/"
    owner = User.objects.create_user("owner@example.com")
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), owner, "owner")
    client.force_login(owner)
    assert client.get("/operator/tenants/").status_code == 404
    assert client.get("/operator/django-admin/").url.startswith("/operator/django-admin/login/")


def test_the_raw_admin_works_and_is_read_only(client, operator):
    tenant = actions.do_create_tenant("acme", "Acme")
    key, _ = actions.do_create_api_key(only_project(tenant), "k")
    for path in ("", "tenants/user/", "tenants/tenant/", "tenants/project/", "tenants/membership/", "tenants/apikey/"):
        assert client.get(f"/operator/django-admin/{path}").status_code == 200, path
    for kind, row in (("apikey", key), ("tenant", tenant), ("project", key.project), ("user", operator)):
        assert client.get(f"/operator/django-admin/tenants/{kind}/{row.pk}/change/").status_code == 200, kind
    page = client.get(f"/operator/django-admin/tenants/apikey/{key.pk}/change/").content.decode()
    assert key.prefix in page
    assert "key_hash" not in page
    assert client.post(f"/operator/django-admin/tenants/apikey/{key.pk}/change/", {"name": "other"}).status_code == 403
    assert client.post(f"/operator/django-admin/tenants/tenant/{tenant.pk}/delete/", {"post": "yes"}).status_code == 403


def test_every_model_of_the_raw_admin_is_read_only(client, operator):
    """No row of any registered model can be added or changed."""
    from django.contrib import admin
    from django.contrib.admin.models import LogEntry

    kinds = {model._meta.label_lower for model in admin.site._registry}
    money = ("budget", "invoice", "invoiceline", "ledgerentry", "ledgertransaction", "payment", "price")
    assert {f"billing.{name}" for name in money} | {"tenants.auditentry"} <= kinds
    assert not kinds & {"socialaccount.socialtoken", "socialaccount.socialapp", "auth.group"}
    for kind in sorted(kinds):
        url = f"/operator/django-admin/{kind.replace('.', '/')}/"
        assert client.get(url).status_code == 200, kind
        assert client.get(f"{url}add/").status_code == 403, kind
        assert client.post(f"{url}add/", {}).status_code == 403, kind
        sent = {"action": "delete_selected", "_selected_action": "1", "post": "yes"}
        client.post(url, sent)
    assert LogEntry.objects.count() == 0


def test_money_and_the_audit_log_cannot_be_changed_by_the_raw_admin(client, operator):
    tenant = actions.do_create_tenant("acme", "Acme")
    budget = do_make_budget(tenant, name="All of it", unit="money", period="month", amount=5)
    entry = unscoped(AuditEntry).order_by("id")[0]
    for kind, row in (("billing/budget", budget), ("tenants/auditentry", entry)):
        url = f"/operator/django-admin/{kind}/{row.pk}"
        assert client.get(f"{url}/change/").status_code == 200
        assert client.post(f"{url}/change/", {"amount": "6", "verb": "x"}).status_code == 403
        assert client.post(f"{url}/delete/", {"post": "yes"}).status_code == 403
        selected = {"action": "delete_selected", "_selected_action": str(row.pk), "post": "yes"}
        client.post(f"/operator/django-admin/{kind}/", selected)
    assert unscoped(Budget).get(pk=budget.pk).amount == 5
    assert unscoped(AuditEntry).filter(pk=entry.pk)


def test_people_and_second_factors_are_read_only_and_no_secret_is_shown(client, operator):
    person = User.objects.create_user("dev@example.com", "correct horse battery staple")
    lost = Authenticator.objects.create(user=person, type="totp", data={"secret": "hush-hush"})
    for kind, row in (("mfa/authenticator", lost), ("tenants/user", person)):
        url = f"/operator/django-admin/{kind}/{row.pk}"
        page = client.get(f"{url}/change/").content.decode()
        assert "hush" not in page and person.password not in page
        for verb in ("change", "delete"):
            assert client.post(f"{url}/{verb}/", {"post": "yes", "is_staff": "on"}).status_code == 403
    assert client.post(
        f"/operator/django-admin/tenants/user/{person.pk}/password/", {"password1": "x"}
    ).status_code in (302, 404)
    person.refresh_from_db()
    assert not person.is_staff and person.check_password("correct horse battery staple")
    assert Authenticator.objects.exists()


def test_the_api_schema_and_its_page(client, monkeypatch):
    schema = client.get("/api/schema/").content.decode()
    assert "/api/usage" in schema
    assert "scheme: bearer" in schema
    as_json = client.get("/api/schema/", headers={"accept": "application/json"})
    assert as_json.headers["content-type"] == "application/json"
    assert as_json.json() == read_yaml(schema)
    monkeypatch.delattr(SchemaGenerator, "get_schema")  # a process generates the document once
    assert client.get("/api/schema/", headers={"accept-language": "de"}).content.decode() == schema
    page = client.get("/api/docs/").content.decode()
    assert "swagger-ui" in page
    assert "<style" not in page
