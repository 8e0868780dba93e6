"""/login is the only URL that opens a session, and operators' sessions require the second factor."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from allauth.account.internal.flows.login import AUTHENTICATION_METHODS_SESSION_KEY
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django.core.cache import cache
from django.test import Client, override_settings

from inference_worker.contract import env
from millrace.environment.configuration import PlatformSettings, effective_environ
from tenants import actions, invitations
from tenants.models import ApiKey, Invitation, User
from tests.support.frontend.paths import ADMIN_URLS, paths
from tests.support.frontend.totp import current_code
from tests.support.rows import only_project, unscoped

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery staple"
EMAIL = "op@example.com"
OPEN = {"/account/mfa/reauthenticate/", "/account/mfa/webauthn/reauthenticate/", "/logout"}  # without the second factor


@pytest.fixture(autouse=True)
def _fast(settings: Any) -> None:
    cache.clear()


@pytest.fixture
def operator() -> User:
    return User.objects.create_superuser(EMAIL, PASSWORD)


@pytest.fixture
def secret(operator: User) -> str:
    """Return the secret of the operator's TOTP."""
    secret = generate_totp_secret()
    TOTP.activate(operator, secret)
    return secret


def log_in(client: Client) -> Any:
    return client.post("/login", {"login": EMAIL, "password": PASSWORD})


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def send_credentials(client: Client, url: str) -> None:
    named = dict.fromkeys(("login", "username", "email"), EMAIL)
    secrets = dict.fromkeys(("password", "password1", "password2", "oldpassword"), PASSWORD)
    sent = named | secrets | {"code": "000000", "next": "/operator/"}
    client.post(url, sent)
    client.post(url, sent, content_type="application/json")
    client.get(url, sent)


@pytest.mark.urls(ADMIN_URLS)
def test_only_login_opens_a_session(operator):
    found = paths(ADMIN_URLS)
    assert len(found) > 150
    assert {"/login", "/account/password/reset", "/account/oidc/sso/login/callback/", "/api/operator/users"} < {*found}
    assert {*found} - {*paths("millrace.conf.urls")} >= {"/operator/django-admin/login/"}
    opened = []
    for url in found:
        client = Client(raise_request_exception=False)
        send_credentials(client, url)
        if is_signed_in(client):
            opened.append(url)
    assert opened == ["/login"]


@pytest.mark.urls(ADMIN_URLS)
def test_with_a_second_factor_a_password_opens_no_session(operator, secret):
    for url in paths(ADMIN_URLS):
        client = Client(raise_request_exception=False)
        send_credentials(client, url)
        assert not is_signed_in(client), url


@pytest.mark.urls(ADMIN_URLS)
def test_a_session_without_the_second_factor_has_no_access(operator, secret):
    """This applies to sessions of Django's `login()` and of a password before the factor was enrolled."""
    for record in (None, {"method": "password", "at": time.time(), "reauthenticated": True}):
        client = Client(raise_request_exception=False)
        client.force_login(operator)
        session = client.session
        if record:
            session[AUTHENTICATION_METHODS_SESSION_KEY] = [record]
            session["account_authentication_methods_user"] = str(operator.pk)
            session.save()
        for url in paths(ADMIN_URLS):
            if url in OPEN or url.startswith("/invitations/"):
                continue
            for answer in (client.get(url), client.post(url, {"password": PASSWORD, "typed": EMAIL})):
                if url.startswith("/api/"):
                    assert (answer.status_code, answer.json()["code"]) == (403, "second_factor_required"), url
                else:
                    assert answer.status_code == 302, url
                    assert answer.url.startswith("/account/mfa/reauthenticate/?next="), url
        panel = client.get("/operator/", headers={"HX-Request": "true"})
        assert panel.headers["HX-Redirect"].startswith("/account/mfa/reauthenticate/")
    assert Authenticator.objects.filter(user=operator, type="totp").exists()


def test_a_code_completes_a_session_without_the_second_factor(client, operator, secret):
    client.force_login(operator)
    response = client.get("/operator/tenants/?q=x")
    assert response.url == "/account/mfa/reauthenticate/?next=%2Foperator%2Ftenants%2F%3Fq%3Dx"
    assert client.get(response.url).status_code == 200
    assert client.post(response.url, {"code": "000000"}).status_code == 200
    assert client.get("/operator/").status_code == 302
    assert (
        client.post(response.url, {"code": current_code(secret), "next": "/operator/tenants/?q=x"}).url
        == "/operator/tenants/?q=x"
    )
    assert client.get("/operator/").status_code == client.get("/api/operator/tenants").status_code == 200


def test_a_session_with_the_second_factor_has_access(client, operator, secret):
    assert log_in(client).url == "/account/mfa/authenticate/"
    client.post("/account/mfa/authenticate/", {"code": current_code(secret)})
    assert client.get("/operator/").status_code == client.get("/api/operator/tenants").status_code == 200


def test_enrolling_completes_this_session_and_closes_the_others(client, operator):
    other = Client()
    for each in (client, other):
        log_in(each)
        assert each.get("/operator/").status_code == 200
    client.post("/account/confirm", {"password": PASSWORD})
    page = client.get("/account/mfa/totp/activate/").content.decode()
    (found,) = re.findall(r"<code>(\w{16,})</code>", page)
    client.post("/account/mfa/totp/activate/", {"code": current_code(found)})
    assert client.get("/operator/").status_code == 200
    assert other.get("/operator/").url.startswith("/account/mfa/reauthenticate/")
    assert other.get("/api/operator/tenants").status_code == 403


def test_a_session_with_a_code_of_a_removed_device_has_no_access(client, operator, secret):
    log_in(client)
    client.post("/account/mfa/authenticate/", {"code": current_code(secret)})
    assert client.get("/operator/").status_code == 200
    Authenticator.objects.filter(user=operator).delete()
    TOTP.activate(operator, generate_totp_secret())
    assert client.get("/operator/").url.startswith("/account/mfa/reauthenticate/")


def test_a_password_does_not_reauthenticate_a_user_with_a_second_factor(client):
    """Otherwise a password would suffice to remove the factor."""
    user = User.objects.create_user("dev@example.com", PASSWORD)
    TOTP.activate(user, generate_totp_secret())
    client.force_login(user)
    response = client.post("/account/confirm", {"password": PASSWORD})
    assert response.url == "/account/mfa/reauthenticate/"
    assert client.post("/account/mfa/totp/deactivate/").url.startswith("/account/mfa/reauthenticate/")
    assert Authenticator.objects.filter(user=user).exists()


def test_an_operators_key_requires_no_session(operator, secret):
    tenant = actions.do_create_tenant("acme", "Acme")
    _, key = actions.do_create_api_key(only_project(tenant), "k", scopes=["manage"])
    assert Client().get("/api/tenant", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert len(unscoped(ApiKey).all()) == 1


def test_an_accepted_invitation_signs_in_by_the_same_steps(client):
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_invite(tenant, "new@example.com", "owner")
    url = f"/invitations/{invitations.token(unscoped(Invitation).get(email='new@example.com'))}"
    response = client.post(url, {"name": "New", "password": PASSWORD})
    assert response.url == "/t/acme/"
    assert client.get("/t/acme/").status_code == 200
    (record,) = client.session[AUTHENTICATION_METHODS_SESSION_KEY]
    assert record["method"] == "password"
    assert any(name.startswith("device_") for name in client.cookies)
    again = Client()
    again.post(url, {"name": "x", "password": PASSWORD})
    assert not is_signed_in(again)  # it works once


def test_a_reset_password_opens_no_session(client, operator):
    from django.core import mail

    client.post("/account/password/reset", {"email": EMAIL})
    (path_,) = re.findall(r"http://[^/]+(/account/password/reset/\S+)", mail.outbox[0].body)
    new = "another horse battery staple"
    client.post(client.get(path_).url, {"password1": new, "password2": new})
    operator.refresh_from_db()
    assert operator.check_password(new)
    assert not is_signed_in(client)


def test_djangos_admin_is_off(client, operator):
    client.force_login(operator)
    for url in ("/operator/django-admin/", "/operator/django-admin/login/", "/operator/django-admin/tenants/user/"):
        assert client.get(url).status_code == 404
    assert "Django admin" not in client.get("/operator/").content.decode()


@pytest.mark.urls(ADMIN_URLS)
def test_djangos_admin_uses_the_consoles_login(client, operator):
    assert client.get("/operator/django-admin/").url == "/operator/django-admin/login/?next=/operator/django-admin/"
    assert (
        client.get("/operator/django-admin/login/?next=/operator/django-admin/tenants/user/").url
        == "/login?next=/operator/django-admin/tenants/user/"
    )
    assert client.get("/operator/django-admin/login/?next=//evil.example/").url == "/login?next=/operator/django-admin/"
    for _ in range(3):
        response = client.post("/operator/django-admin/login/", {"username": EMAIL, "password": PASSWORD})
        assert response.url == "/login?next=/operator/django-admin/"
        assert not is_signed_in(client)
    client.force_login(operator)
    assert "Django admin" in client.get("/operator/").content.decode()
    assert client.post("/operator/django-admin/password_change/", {"old_password": "x"}).url == "/account/password"
    member = Client()
    member.force_login(User.objects.create_user("dev@example.com"))
    assert member.get("/operator/django-admin/", follow=True).status_code == 404


def test_a_setting_enables_djangos_admin():
    environ = effective_environ()
    assert env.load(PlatformSettings, environ).django_admin is False
    assert env.load(PlatformSettings, environ | {"MILLRACE_DJANGO_ADMIN": "true"}).django_admin is True


@override_settings(OPERATORS_NEED_TOTP=True)
def test_a_user_who_must_enroll_has_no_other_access(client, operator):
    log_in(client)
    assert client.get("/operator/").url == "/account/mfa/totp/activate/"
    assert client.get("/api/operator/tenants").json()["code"] == "totp_required"
