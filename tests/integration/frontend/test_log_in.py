"""Signing in and out, and the redirect of `/`."""

from __future__ import annotations

import pytest

from tenants import actions
from tenants.models import User

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery staple"


@pytest.fixture
def user() -> User:
    return User.objects.create_user("dev@example.com", PASSWORD)


def log_in(client, **fields: str):
    return client.post("/login", {"login": "dev@example.com", "password": PASSWORD} | fields)


def test_signing_in(client, user):
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), user, "developer")
    assert client.get("/", follow=True).redirect_chain == [("/login?next=/", 302)]
    page = client.get("/login").content.decode()
    assert 'type="email"' in page
    assert 'type="password"' in page
    response = log_in(client, login="Dev@Example.com")
    assert response.status_code == 302
    assert client.get("/").url == "/t/acme/"
    assert client.get("/login").url == "/"


def test_the_forgotten_password_has_one_link(client):
    assert client.get("/login").content.decode().count('href="/account/password/reset"') == 1


def test_signing_in_redirects_to_the_requested_page(client, user):
    assert log_in(client, next="/t/acme/").url == "/t/acme/"
    client.logout()
    assert log_in(client, next="https://elsewhere.example/").url == "/"


@pytest.mark.parametrize(
    "fields",
    [{"password": "wrong"}, {"login": "unknown@example.com"}, {"login": "no address"}],
)
def test_a_wrong_password_is_rejected(client, user, fields):
    response = log_in(client, **fields)
    assert response.status_code == 200
    assert "_auth_user_id" not in client.session
    page = response.content.decode()
    assert 'role="alert"' in page or 'class="field-error"' in page


def test_an_inactive_user_is_rejected(client, user):
    User.objects.filter(pk=user.pk).update(is_active=False)
    log_in(client)
    assert "_auth_user_id" not in client.session


def test_signing_out_requires_post(client, user):
    client.force_login(user)
    assert client.get("/logout").status_code == 405
    assert client.post("/logout").url == "/login"
    assert "_auth_user_id" not in client.session


def test_an_operator_is_redirected_to_the_tenants(client):
    client.force_login(User.objects.create_superuser("op@example.com"))
    assert client.get("/").url == "/operator/"


def test_a_member_of_several_tenants_chooses_one(client, user):
    client.force_login(user)
    assert "not a member" in client.get("/").content.decode()
    for slug in ("acme", "lab"):
        actions.do_add_member(actions.do_create_tenant(slug, slug.title()), user, "owner")
    actions.do_create_tenant("other", "Other")
    page = client.get("/").content.decode()
    assert "/t/acme/" in page
    assert "/t/lab/" in page
    assert "Other" not in page
