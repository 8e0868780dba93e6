"""The operators' list of tenants, and what is around it."""

from __future__ import annotations

import pytest

from tenants import actions
from tenants.models import AuditEntry, User
from tests.seeing import Everybody, only_project

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(client) -> User:
    user = User.objects.create_superuser("op@example.com")
    client.force_login(user)
    return user


def test_it_works(client, operator, use):
    acme, lab = actions.do_create_tenant("acme", "Acme"), actions.do_create_tenant("lab", "Lab", is_demo=True)
    project = only_project(acme)
    for _ in range(2):
        key, _ = actions.do_create_api_key(project, "k")
    actions.do_revoke_api_key(key)
    actions.do_suspend_tenant(lab)
    use(acme, uncached=1000, output=234)
    use(acme, uncached=5000, verdict="failed")
    response = client.get("/ops/tenants/")
    first, second = response.context["page"].rows
    assert (first.url, first.live_keys, first.requests, first.failed, first.tokens) == (
        "/t/acme/",
        "1",
        "2",
        "1",
        "1,234",
    )
    assert (second.status_label, second.requests, second.tokens) == ("Suspended", "0", "0")
    page = response.content.decode()
    assert "Demo" in page
    assert "Suspended" in page


def test_it_rejects_who_is_no_operator(client):
    assert client.get("/ops/tenants/").url == "/login?next=/ops/tenants/"
    owner = User.objects.create_user("owner@example.com")
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), owner, "owner")
    client.force_login(owner)
    assert client.get("/ops/tenants/").status_code == 404
    assert client.get("/ops/raw/").status_code == 302


def test_no_tenant_yet(client, operator):
    assert "There is no tenant yet" in client.get("/ops/tenants/").content.decode()


def test_queries_are_bounded(client, operator, use, django_assert_num_queries):
    for number in range(6):
        use(actions.do_create_tenant(f"t{number}", "T"))
    with django_assert_num_queries(9):
        client.get("/ops/tenants/")


def test_the_raw_admin_works_and_is_read_only(client, operator):
    tenant = actions.do_create_tenant("acme", "Acme")
    key, _ = actions.do_create_api_key(only_project(tenant), "k")
    for path in ("", "tenants/user/", "tenants/tenant/", "tenants/project/", "tenants/membership/", "tenants/apikey/"):
        assert client.get(f"/ops/raw/{path}").status_code == 200, path
    for kind, row in (("apikey", key), ("tenant", tenant), ("project", key.project), ("user", operator)):
        assert client.get(f"/ops/raw/tenants/{kind}/{row.pk}/change/").status_code == 200, kind
    page = client.get(f"/ops/raw/tenants/apikey/{key.pk}/change/").content.decode()
    assert key.prefix in page
    assert "key_hash" not in page
    assert client.post(f"/ops/raw/tenants/apikey/{key.pk}/change/", {"name": "other"}).status_code == 403
    assert client.post(f"/ops/raw/tenants/tenant/{tenant.pk}/delete/", {"post": "yes"}).status_code == 403


def test_people_are_changed_in_the_raw_admin_with_an_audit_row(client, operator):
    person = User.objects.create_user("dev@example.com", "correct horse battery staple")
    url = f"/ops/raw/tenants/user/{person.pk}"
    assert client.post(f"{url}/change/", {"email": person.email, "name": "Dev", "is_active": "on"}).status_code == 302
    new = "another horse battery staple"
    sent = {"usable_password": "true", "password1": new, "password2": new}
    assert client.post(f"{url}/password/", sent).status_code == 302
    changed, password = sorted(Everybody(AuditEntry).filter(object_id=person.pk), key=lambda entry: entry.pk)
    assert (changed.verb, changed.before, changed.after) == ("user.update", {"name": ""}, {"name": "Dev"})
    assert (password.verb, password.actor) == ("user.password_changed", "op@example.com")
    assert client.post(f"{url}/delete/", {"post": "yes"}).status_code == 403


def test_the_schema_and_its_page_work(client):
    schema = client.get("/api/schema/").content.decode()
    assert "/api/usage" in schema
    assert "scheme: bearer" in schema
    page = client.get("/api/docs/").content.decode()
    assert "swagger-ui" in page
    assert "<style" not in page
