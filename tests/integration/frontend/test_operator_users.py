"""The operators' users: the list, a user, and the actions with their confirmations."""

from __future__ import annotations

import re

import pytest
from allauth.mfa.models import Authenticator
from django.test import Client

from tenants import actions
from tenants.models import AuditEntry, User
from tests.support.frontend.console import remembered
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
VERBS = ("deactivate", "reactivate", "grant-operator", "revoke-operator", "remove-second-factor")


@pytest.fixture
def operator(client: Client) -> User:
    user = User.objects.create_superuser("op@example.com", name="Otto Operator")
    client.force_login(user)
    remembered(client.session)
    return user


@pytest.fixture
def dev() -> User:
    user = User.objects.create_user("dev@example.com", name="Dev Eloper")
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), user, "developer")
    Authenticator.objects.create(user=user, type=Authenticator.Type.TOTP, data={"secret": "hush-hush"})
    return user


def test_users_are_listed_searched_and_filtered(client, operator, dev):
    actions.do_deactivate_user(User.objects.create_user("left@example.com"))

    def found(query: str) -> set[str]:
        page = client.get(f"/operator/users/{query}").content.decode()
        return {user.email for user in User.objects.all() if f"/operator/users/{user.pk}/" in page}

    assert found("") == {"op@example.com", "dev@example.com", "left@example.com"}
    assert found("?q=eloper") == found("?q=DEV@") == {"dev@example.com"}
    assert found("?show=operators") == {"op@example.com"}
    assert found("?show=deactivated") == {"left@example.com"}
    assert found("?show=unprotected") == {"op@example.com"}
    assert "No user matches" in client.get("/operator/users/?q=zzz").content.decode()
    assert f"/operator/users/{dev.pk}/" in client.get("/operator/search?q=eloper").content.decode()


def test_one_user_is_shown_with_tenants_and_changes(client, operator, dev):
    actions.do_deactivate_user(dev)
    page = client.get(f"/operator/users/{dev.pk}/").content.decode()
    for text in ("Dev Eloper", "Acme", "Developer", "User deactivated", "Reactivate", "Remove 2FA"):
        assert text in page, text
    assert "hush" not in page
    assert client.get("/operator/users/99999999/").status_code == 404


def test_the_users_own_page_has_no_actions(client, operator, dev):
    page = client.get(f"/operator/users/{operator.pk}/").content.decode()
    assert "This is your own login" in page
    assert not [verb for verb in VERBS if f"/{verb}" in page]
    response = client.post(f"/operator/users/{operator.pk}/deactivate", {"typed": operator.email})
    assert response.status_code == 422
    assert "Ask another operator" in response.content.decode()


def test_actions_are_recorded_and_the_final_one_requires_the_email_address(client, operator, dev):
    for verb in ("grant-operator", "revoke-operator", "remove-second-factor", "deactivate", "reactivate"):
        url = f"/operator/users/{dev.pk}/{verb}"
        fields = {"typed": dev.email} if verb == "remove-second-factor" else {}
        if fields:
            assert client.post(url, {"typed": "other@example.com"}).status_code == 422
        assert client.post(url, fields).url == f"/operator/users/{dev.pk}/"
    rows = sorted(unscoped(AuditEntry).filter(object_type="user", object_id=dev.pk), key=lambda row: row.pk)
    assert [row.action.removeprefix("user.") for row in rows] == [
        *("operator_granted", "operator_revoked", "second_factor_removed", "deactivated", "reactivated")
    ]
    assert {row.actor for row in rows} == {"op@example.com"}
    dev.refresh_from_db()
    assert dev.is_active and not dev.is_staff


@pytest.mark.parametrize("name", VERBS)
def test_an_action_has_one_verb(client, operator, dev, name):
    """In its button, its title, its submit button, its message and the audit log."""
    verb = name.partition("-")[0]
    if name == "revoke-operator":
        actions.do_grant_operator(dev)
    if name == "reactivate":
        actions.do_deactivate_user(dev)
    url = f"/operator/users/{dev.pk}/{name}"
    buttons = dict(
        re.findall(r'href="([^"]+)" hx-get[^>]*><svg.*?</svg>([^<]+)</a>', text(client, url.rpartition("/")[0]))
    )
    assert buttons[url].startswith(verb.capitalize())
    form = text(client, url)
    assert re.search(rf"<h1>{verb.capitalize()} ", form)
    assert re.search(rf'type="submit">{verb.capitalize()}</button>', form)
    message = text(client, client.post(url, {"typed": dev.email}).url)
    past = {"grant": "granted"}.get(verb, f"{verb.removesuffix('e')}ed")
    assert re.search(rf'class="toast[^>]*>.*? {past}[ .]', message)
    rows = unscoped(AuditEntry).filter(object_type="user", object_id=dev.pk)
    assert max(rows, key=lambda row: row.pk).action.endswith(past)


def text(client: Client, url: str) -> str:
    return client.get(url, follow=True).content.decode()


def test_actions_require_reauthentication_and_an_operator(client, operator, dev):
    session = client.session
    del session["account_authentication_methods"]
    session.save()
    member = Client()
    member.force_login(dev)
    for verb in VERBS:
        url = f"/operator/users/{dev.pk}/{verb}"
        assert client.post(url, {"typed": dev.email}).url.startswith("/account/")
        assert member.get(url).status_code == member.post(url, {"typed": dev.email}).status_code == 404
    assert member.get("/operator/users/").status_code == member.get(f"/operator/users/{dev.pk}/").status_code == 404
