"""API keys in the console: secrets, effective limits, permissions and reauthentication."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.test import Client

from billing.budgets.budgets import do_make_budget
from tenants import actions
from tenants.audit import PLATFORM, actor_context
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import ApiKey, AuditEntry, IdempotentResponse, LimitSet, Project, Tenant, User
from tests.support.frontend.console import remembered
from tests.support.rows import only_project, unscoped
from tests.support.tenants.concurrency import at_once

pytestmark = pytest.mark.django_db(transaction=True)
NEW = {"name": "prod", "scopes": ["inference", "models"], "addresses": "", "expires_on": ""}


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
    assert (response.status_code, response.url) == (303, f"/t/acme/keys/{key.pk}/secret")
    assert client.head(response.url).status_code == 303  # shows nothing, so it takes nothing
    response = client.get(response.url)
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
    again = client.get(f"/t/acme/keys/{key.pk}/secret")
    assert (again.status_code, again.url) == (303, f"/t/acme/keys/{key.pk}/")
    assert "was shown once and cannot be shown again" in client.get(again.url).content.decode()
    for path in ("/t/acme/keys/", f"/t/acme/keys/{key.pk}/", "/t/acme/audit/"):
        page = client.get(path).content.decode()
        assert secret not in page, path
        assert key.prefix in page, path


def test_a_secret_that_waits_is_stored_encrypted_and_is_its_users(client, acme, log_in, monkeypatch, capfd):
    owner = log_in()
    sent: list[tuple[Any, str]] = []
    real = actions.do_create_api_key
    monkeypatch.setattr(actions, "do_create_api_key", lambda *a, **b: sent.append(made := real(*a, **b)) or made)
    form = NEW | {"project": only_project(acme).pk}
    url = client.post("/t/acme/keys/new", form).url
    ((_, secret),) = sent
    stored = b"".join(bytes(row.body) for row in unscoped(IdempotentResponse).all())
    stored += "".join(str(row.get_decoded()) for row in Session.objects.all()).encode()
    assert len(stored) > 100 and secret.encode() not in stored
    assert secret not in "".join(capfd.readouterr())
    log_in("admin")
    assert client.get(url).status_code == 303  # another user of the tenant
    client.force_login(owner)
    with monkeypatch.context() as patch:
        patch.setattr("frontend.core.one_time_secrets.SECRET_TTL", timedelta(0))
        assert client.get(url).status_code == 303
    assert client.get(url).status_code == 303  # too old means deleted
    assert [row for row in unscoped(IdempotentResponse).all() if row.body] == []


def test_a_form_sent_twice_makes_one_key(client, acme, log_in):
    """By a double click, by a reload, or by going back: the second answer leads to the same page."""
    user = log_in()
    page = client.get("/t/acme/keys/new").content.decode()
    (token,) = re.findall(r'name="form_token" value="([^"]+)"', page)
    form = NEW | {"project": only_project(acme).pk, "form_token": token}

    def send() -> Any:
        mine = Client()
        mine.force_login(user)
        remembered(mine.session)
        return mine.post("/t/acme/keys/new", form)

    answers = at_once(*[send] * 4)
    key = unscoped(ApiKey).get()
    assert {(answer.status_code, answer.url) for answer in answers} == {(303, f"/t/acme/keys/{key.pk}/secret")}
    assert client.get(answers[0].url).status_code == 200
    assert client.post("/t/acme/keys/new", form).url == answers[0].url
    assert client.get(answers[0].url).status_code == 303
    assert unscoped(ApiKey).count() == 1
    assert client.post("/t/acme/keys/new", form | {"name": ""}).status_code == 422
    assert client.post("/t/acme/keys/new", form | {"name": "another"}).status_code == 303
    assert unscoped(ApiKey).count() == 2


def test_the_secret_of_a_form_in_a_dialog_is_shown_in_the_dialog(client, acme, log_in):
    log_in()
    headers = {"HX-Request": "true"}
    answer = client.post("/t/acme/keys/new", NEW | {"project": only_project(acme).pk}, headers=headers)
    assert answer.status_code == 303  # which the browser follows, with the same headers
    inside = client.get(answer.url, headers=headers).content.decode()
    assert "<html" not in inside and "sk-mr-" in inside
    assert client.get(answer.url, headers=headers).headers["HX-Redirect"].startswith("/t/acme/keys/")


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
    for what in ("edit", "rotate", "revoke"):
        assert client.get(f"/t/acme/keys/{manager.pk}/{what}").status_code == 403
    assert client.get("/t/acme/projects/new").status_code == 403
    assert client.post("/t/acme/keys/new", form).status_code == 303
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
        return set(re.findall(r'<th scope="row">(?:<input [^>]+> )?<a href="/t/acme/keys/\d+/">(\w+)<', page))

    assert names("") == {"own", "lasting", "idle"}
    assert names("unlimited") == {"lasting", "idle"}
    assert names("forever") == {"lasting", "idle"}
    assert names("idle") == {"idle"}
    assert names("ended") == {"gone"}


def test_rotating_and_revoking(client, acme, log_in):
    log_in()
    key = make(acme)
    response = client.post(f"/t/acme/keys/{key.pk}/rotate", {"overlap": "24"})
    old, new = sorted(unscoped(ApiKey).all(), key=lambda row: row.pk)
    assert (response.status_code, response.url) == (303, f"/t/acme/keys/{new.pk}/secret")
    assert new.prefix in client.get(response.url).content.decode()
    assert new.replaces_id == old.pk
    assert old.expires_at is not None
    assert "Being replaced" in client.get(f"/t/acme/keys/{old.pk}/").content.decode()
    assert client.post(f"/t/acme/keys/{new.pk}/revoke", {"typed": "another"}).status_code == 422
    assert unscoped(ApiKey).get(pk=new.pk).revoked_at is None
    said = client.get(f"/t/acme/keys/{new.pk}/revoke").content.decode()
    assert "stops working immediately" in said
    assert client.post(f"/t/acme/keys/{new.pk}/revoke", {"typed": "prod"}).status_code == 303
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


def test_a_blank_slug_is_derived_from_the_name(client, acme, log_in):
    log_in()
    for slug in ("search", "search-2"):
        assert client.post("/t/acme/projects/new", {"name": "Search!", "slug": ""}).status_code == 303
        assert unscoped(Project).get(slug=slug).name == "Search!"


def test_projects_of_one_name_made_at_once_have_slugs_of_their_own(acme):
    found = at_once(*[lambda: actions.do_create_project(acme, "", "Search bot")] * 4)
    assert {project.slug for project in found} == {"search-bot", "search-bot-2", "search-bot-3", "search-bot-4"}
    assert actions.do_create_project(acme, "mine", "Search bot").slug == "mine"


def test_the_creator_of_a_key_is_named(client, acme, log_in):
    log_in()
    by_command = make(acme, name="by-command")
    with actor_context(PLATFORM.as_key(by_command)):
        make(acme, name="by-key")
    gone = User.objects.create_user("gone@example.com")
    with actor_context(PLATFORM.as_user(gone)):
        make(acme, name="by-user")  # deleting a user sets `created_by` to null
    page = client.get("/t/acme/keys/").content.decode()
    assert "Operator" in row_of(page, "by-command")
    assert f"API key {by_command.prefix}…" in row_of(page, "by-key")
    assert "gone@example.com (deleted user)" in row_of(page, "by-user")
    assert "Operator" in client.get(f"/t/acme/keys/{by_command.pk}/").content.decode()


def test_selected_keys_are_revoked_together(client, acme, log_in):
    log_in("owner")
    keys = [make(acme, name=name) for name in ("one", "two", "three", "four")]
    page = client.get("/t/acme/keys/").content.decode()
    assert page.count('form="key-selection"') == 6  # the keys and two buttons
    query = "&".join(f"key={key.pk}" for key in keys[:3])
    form = client.get(f"/t/acme/keys/revoke?{query}").content.decode()
    assert "Revoke 3 keys" in form and "four" not in form
    response = client.post("/t/acme/keys/revoke", {"key": [keys[0].pk, keys[1].pk]})  # the third one was deselected
    assert response.status_code == 303
    for _ in range(2):  # also if it is sent twice
        client.post("/t/acme/keys/revoke", {"key": [keys[0].pk, keys[1].pk]})
    alive = {row.name for row in unscoped(ApiKey).filter(revoked_at=None)}
    assert {"three", "four"} <= alive and not {"one", "two"} & alive
    assert len(unscoped(AuditEntry).filter(action="key.revoked")) == 2


def test_selected_keys_are_changed_together_or_not_at_all(client, acme, log_in):
    log_in("owner")
    other = make(actions.do_create_tenant("other", "Other"))
    keys = [make(acme, name=name) for name in ("one", "two", "three")]
    actions.do_set_limits(acme, {"requests_per_minute": 5, "concurrency": 2}, key=keys[0])
    chosen = [key.pk for key in keys[:2]]
    form = client.get("/t/acme/keys/edit", {"key": chosen}).content.decode()
    assert "Edit 2 keys" in form and "three" not in form
    assert "Enter at least one change." in client.post("/t/acme/keys/edit", {"key": chosen}).content.decode()
    both = {"key": chosen, "expires_on": "2031-01-31", "never_expires": "on"}
    assert client.post("/t/acme/keys/edit", both).status_code == 422
    sent = {"key": chosen, "expires_on": "2031-01-31", "requests_per_minute": "7", "cost_center": "4711"}
    assert client.post("/t/acme/keys/edit", sent | {"key": [*chosen, other.pk]}).status_code == 422
    assert client.post("/t/acme/keys/edit", sent).status_code == 303
    rows = {row.name: row for row in unscoped(ApiKey).filter(pk__in=[key.pk for key in keys])}
    end = datetime(2031, 2, 1, tzinfo=UTC)
    assert [(rows[name].expires_at, rows[name].cost_center) for name in ("one", "two", "three")] == [
        *[(end, "4711")] * 2,
        (None, ""),
    ]
    limits = {row.key_id: (row.requests_per_minute, row.concurrency) for row in unscoped(LimitSet).all()}
    assert limits == {keys[0].pk: (7, 2), keys[1].pk: (7, None)}
    assert unscoped(ApiKey).get(pk=other.pk).expires_at is None
    assert len(unscoped(AuditEntry).filter(action="key.updated")) == 2

    # The second key expires meanwhile, so that none is changed.
    with all_tenants_scope(BypassReason.OPERATOR):
        ApiKey.objects.all_tenants().filter(pk=keys[1].pk).update(expires_at=datetime.now(UTC) - timedelta(days=1))
    refused = client.post("/t/acme/keys/edit", {"key": chosen, "never_expires": "on", "requests_per_minute": "9"})
    assert refused.status_code == 422
    assert "two: This key is revoked or expired." in refused.content.decode()
    assert unscoped(ApiKey).get(pk=keys[0].pk).expires_at == end
    assert {row.requests_per_minute for row in unscoped(LimitSet).all()} == {7}


@pytest.mark.parametrize("sent", [{}, {"key": ["x", "999999"]}])
def test_a_selection_without_active_keys_is_an_error(client, acme, log_in, sent):
    log_in("owner")
    response = client.get("/t/acme/keys/revoke", sent, follow=True)
    assert "Select active keys first." in response.content.decode()


def test_keys_of_others_and_of_managers_are_not_revoked(client, acme, log_in):
    other = actions.do_create_tenant("other", "Other")
    theirs = make(other)
    managing = make(acme, name="ci", scopes=["manage"])
    log_in("owner")
    client.post("/t/acme/keys/revoke", {"key": [theirs.pk]})
    assert client.post("/t/acme/keys/edit", {"key": [theirs.pk], "cost_center": "x"}).url == "/t/acme/keys/"
    log_in("developer")
    assert client.post("/t/acme/keys/edit", {"key": [managing.pk], "cost_center": "x"}).status_code == 403
    assert client.post("/t/acme/keys/revoke", {"key": [managing.pk]}).status_code == 403
    assert len(unscoped(ApiKey).filter(pk__in=[theirs.pk, managing.pk], revoked_at=None)) == 2


def test_a_key_has_a_cost_center(client, acme, log_in):
    log_in()
    form = NEW | {"project": only_project(acme).pk}
    client.post("/t/acme/keys/new", form | {"cost_center": "4711 Support"})
    key = unscoped(ApiKey).get()
    assert key.cost_center == "4711 Support"
    url = f"/t/acme/keys/{key.pk}"
    assert "4711 Support" in client.get(f"{url}/").content.decode()
    for wrong, message in (("x" * 61, "60 characters"), ("a\x07b", "control characters")):
        refused = client.post(f"{url}/edit", form | {"cost_center": wrong})
        assert message in refused.content.decode()
    client.post(f"{url}/edit", form | {"cost_center": ""})
    assert unscoped(ApiKey).get().cost_center == ""
