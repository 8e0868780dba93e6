"""API keys in the console: secrets, effective limits, permissions and reauthentication."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing.actions.budgets import do_make_budget
from tenants import actions
from tenants.models import ApiKey, AuditEntry, Project, Tenant, User
from tests.support.frontend.console import remembered
from tests.support.rows import only_project, unscoped

pytestmark = pytest.mark.django_db(transaction=True)
NEW = {"name": "prod", "scopes": ["inference", "models"], "addresses": "", "expires_on": ""}


@pytest.fixture
def acme() -> Tenant:
    return actions.do_create_tenant("acme", "Acme")


@pytest.fixture
def log_in(client: Any, acme: Tenant) -> Any:
    def log_in(role: str = "owner", *, proved: bool = True) -> User:
        user = User.objects.create_user(f"{role}@example.com", name=role.title())
        actions.do_add_member(acme, user, role)
        client.force_login(user)
        if proved:
            remembered(client.session)
        return user

    return log_in


def make(tenant: Tenant, **fields: Any) -> ApiKey:
    return actions.do_create_api_key(only_project(tenant), fields.pop("name", "prod"), **fields)[0]


def row_of(page: str, name: str) -> str:
    (row,) = [row for row in page.split("<tr>") if f">{name}</a>" in row]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", row))


def test_a_secret_is_shown_once(client, acme, log_in):
    user = log_in()
    response = client.post("/t/acme/keys/new", NEW | {"project": only_project(acme).pk, "models": ["smollm2-135m"]})
    key = unscoped(ApiKey).get()
    (secret,) = set(re.findall(r"sk-mr-[\w-]{20,}", response.content.decode()))
    assert secret.startswith(key.prefix)
    assert response.headers["Cache-Control"] == "max-age=0, no-cache, no-store, must-revalidate, private"
    assert (key.name, key.allowed_models, key.allowed_ip_ranges, key.expires_at) == (
        "prod",
        ["smollm2-135m"],
        None,
        None,
    )
    assert key.created_by_id == user.pk
    for path in ("/t/acme/keys/", f"/t/acme/keys/{key.pk}/", "/t/acme/audit/"):
        page = client.get(path).content.decode()
        assert secret not in page, path
        assert key.prefix in page, path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scopes": []}, "This field is required"),
        ({"scopes": ["root"]}, "not one of the available choices"),
        ({"models": ["no-such-model"]}, "not one of the available choices"),
        ({"addresses": "nowhere"}, "Allowed IPs"),
        ({"expires_on": "2001-01-01"}, "in the past"),
        ({"project": "999999"}, "not one of the available choices"),
    ],
)
def test_a_form_shows_its_errors(client, acme, log_in, changes, said):
    log_in()
    response = client.post("/t/acme/keys/new", NEW | {"project": only_project(acme).pk} | changes)
    assert response.status_code == 422
    assert said in response.content.decode()
    assert unscoped(ApiKey).count() == 0


def test_creating_a_key_requires_reauthentication(client, acme, log_in):
    log_in(proved=False)
    session = client.session
    session.pop("account_authentication_methods", None)
    session.save()
    response = client.post("/t/acme/keys/new", NEW | {"project": only_project(acme).pk})
    assert response.status_code == 302
    assert response.url.startswith("/account/confirm")
    assert unscoped(ApiKey).count() == 0


def test_permissions_of_roles(client, acme, log_in):
    manager = make(acme, name="boss", scopes=["manage"])
    log_in("developer")
    form = NEW | {"project": only_project(acme).pk}
    assert client.post("/t/acme/keys/new", form | {"scopes": ["manage"]}).status_code == 422
    for what in ("edit", "rotate", "disable"):
        assert client.get(f"/t/acme/keys/{manager.pk}/{what}").status_code == 403
    assert client.get("/t/acme/projects/new").status_code == 403
    assert client.post("/t/acme/keys/new", form).status_code == 200
    log_in("readonly")
    assert "Create key" not in client.get("/t/acme/keys/").content.decode()
    assert client.post("/t/acme/keys/new", form).status_code == 403
    log_in("billing")
    assert client.get("/t/acme/keys/").status_code == 403


def test_a_key_without_own_limits_shows_inherited_ones(client, acme, log_in):
    log_in()
    make(acme, name="free")
    assert "No limit" in row_of(client.get("/t/acme/keys/").content.decode(), "free")
    do_make_budget(acme, name="All", unit="money", period="month", amount=5 * 10**9)
    shown = row_of(client.get("/t/acme/keys/").content.decode(), "free")
    assert "No limit" not in shown
    assert "of $5 .00 per month, the organization’s" in shown


def test_safety_views(client, acme, log_in):
    log_in()
    own, lasting = make(acme, name="own", expires_at=datetime.now(UTC) + timedelta(days=9)), make(acme, name="lasting")
    actions.do_set_limits(acme, {"requests_per_minute": 3}, key=own)
    idle = make(acme, name="idle")
    actions.record_key_usage({idle.pk: datetime.now(UTC) - timedelta(days=91), lasting.pk: datetime.now(UTC)})
    gone = make(acme, name="gone")
    actions.do_revoke_api_key(gone)

    def names(show: str) -> set[str]:
        page = client.get(f"/t/acme/keys/?show={show}").content.decode()
        return set(re.findall(r'<th scope="row"><a href="/t/acme/keys/\d+/">(\w+)<', page))

    assert names("") == {"own", "lasting", "idle"}
    assert names("unlimited") == {"lasting", "idle"}
    assert names("forever") == {"lasting", "idle"}
    assert names("idle") == {"idle"}
    assert names("ended") == {"gone"}


def test_rotating_and_disabling(client, acme, log_in):
    log_in()
    key = make(acme)
    response = client.post(f"/t/acme/keys/{key.pk}/rotate", {"overlap": "24"})
    old, new = sorted(unscoped(ApiKey).all(), key=lambda row: row.pk)
    assert new.prefix in response.content.decode()
    assert new.replaces_id == old.pk
    assert old.expires_at is not None
    assert "Being replaced" in client.get(f"/t/acme/keys/{old.pk}/").content.decode()
    assert client.post(f"/t/acme/keys/{new.pk}/disable", {"typed": "another"}).status_code == 422
    assert unscoped(ApiKey).get(pk=new.pk).revoked_at is None
    said = client.get(f"/t/acme/keys/{new.pk}/disable").content.decode()
    assert "stops working immediately" in said
    assert client.post(f"/t/acme/keys/{new.pk}/disable", {"typed": "prod"}).status_code == 303
    assert unscoped(ApiKey).get(pk=new.pk).revoked_at is not None
    assert unscoped(AuditEntry).filter(action="key.revoked")[0].actor == "owner@example.com"


def test_editing_keeps_the_expiry(client, acme, log_in):
    log_in()
    at = datetime.now(UTC) + timedelta(days=9, seconds=7)
    key = make(acme, expires_at=at)
    page = client.get(f"/t/acme/keys/{key.pk}/edit").content.decode()
    shown = re.search(r'name="expires_on" value="([\d-]+)"', page)
    assert shown is not None
    form = NEW | {"name": "renamed", "expires_on": shown[1]}
    assert client.post(f"/t/acme/keys/{key.pk}/edit", form).status_code == 303
    row = unscoped(ApiKey).get()
    assert (row.name, row.expires_at) == ("renamed", at)


def test_projects(client, acme, log_in):
    log_in()
    assert client.post("/t/acme/projects/new", {"name": "Search", "slug": "search"}).status_code == 303
    assert client.post("/t/acme/projects/new", {"name": "Other", "slug": "search"}).status_code == 422
    project = unscoped(Project).get(slug="search")
    assert client.post(f"/t/acme/projects/{project.pk}/edit", {"name": "Find"}).status_code == 303
    assert client.post(f"/t/acme/projects/{project.pk}/delete", {"typed": "Find"}).status_code == 303
    default = only_project(acme)
    make(acme)
    response = client.post(f"/t/acme/projects/{default.pk}/delete", {"typed": default.name})
    assert response.status_code == 422
    assert "has or had API keys" in response.content.decode()
