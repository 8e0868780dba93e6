"""Account pages: TOTP, recovery codes, password resets and single sign-on."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django.conf import settings as live
from django.core import mail
from django.core.cache import cache
from django.test import Client, override_settings

from tenants import actions
from tenants.models import AuditEntry, User
from tenants.outbox import user_emails
from tests.support.emails import html
from tests.support.frontend.totp import current_code, next_code
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    cache.clear()


@pytest.fixture
def user() -> User:
    user = User.objects.create_user("dev@example.com", PASSWORD)
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), user, "admin")
    return user


def log_in(client: Client, password: str = PASSWORD) -> Any:
    return client.post("/login", {"login": "dev@example.com", "password": password})


def enroll(client: Client) -> str:
    """Set up TOTP right after signing in."""
    page = client.get("/account/mfa/totp/activate/").content.decode()
    (secret,) = re.findall(r"<code>(\w{16,})</code>", page)
    assert client.post("/account/mfa/totp/activate/", {"code": current_code(secret)}).status_code == 302
    return secret


def test_enrolling(client, user, django_capture_on_commit_callbacks):
    log_in(client)
    assert 'Two-factor authentication <span class="badge ">Off' in client.get("/account/").content.decode()
    with django_capture_on_commit_callbacks(execute=True):
        enroll(client)
    assert Authenticator.objects.filter(user=user).count() == 2
    page = client.get("/account/mfa/recovery-codes/").content.decode()
    assert len(re.findall(r"<li><code>", page)) == 10
    assert "Recovery codes" in client.get("/account/mfa/").content.decode()
    for path in ("/account/mfa/recovery-codes/generate/", "/account/mfa/totp/deactivate/"):
        assert client.get(path).status_code == 200, path
    client.post("/account/mfa/totp/deactivate/")
    entries = unscoped(AuditEntry).filter(tenant_id=None)
    assert {entry.action for entry in entries} >= {"user.totp_activated", "user.totp_deactivated"}
    (left,) = (entry for entry in entries if entry.action == "user.totp_deactivated")
    assert (left.actor, left.object_name, left.ip_address) == ("dev@example.com", "dev@example.com", "127.0.0.1")
    assert not Authenticator.objects.filter(user=user).exists()


def test_signing_in_then_requires_the_code(client, user):
    log_in(client)
    secret = enroll(client)
    client.post("/logout")
    assert log_in(client).url == "/account/mfa/authenticate/"
    assert "_auth_user_id" not in client.session
    assert "Two-factor authentication" in client.get("/account/mfa/authenticate/").content.decode()
    assert "Incorrect code" in client.post("/account/mfa/authenticate/", {"code": "000000"}).content.decode()
    assert client.post("/account/mfa/authenticate/", {"code": next_code(secret)}).url == "/"
    assert client.get("/t/acme/").status_code == 200


def test_a_recovery_code_works_once(client, user):
    log_in(client)
    enroll(client)
    page = client.get("/account/mfa/recovery-codes/").content.decode()
    one = re.findall(r"<li><code>(\d+)</code>", page)[0]
    for expected in (302, 200):
        client.post("/logout")
        log_in(client)
        assert client.post("/account/mfa/authenticate/", {"code": one}).status_code == expected


@pytest.mark.parametrize("totp", [False, True])
def test_reauthentication(client, user, totp):
    log_in(client)
    session = client.session
    session["account_authentication_methods"] = [{"method": "password", "at": time.time() - 3600}]
    session.save()
    secret = generate_totp_secret()
    if totp:
        TOTP.activate(user, secret)
    url = "/account/mfa/reauthenticate/" if totp else "/account/confirm"
    page = client.get(f"{url}?next=/account/").content.decode()
    assert "Confirm it’s you" in page
    assert 'value="/account/"' in page
    wrong, right = (
        ({"code": "000000"}, {"code": current_code(secret)}) if totp else ({"password": "x"}, {"password": PASSWORD})
    )
    assert client.post(url, wrong | {"next": "/account/"}).status_code == 200
    assert client.post("/api/keys", {"name": "k"}, "application/json").json()["code"] == "reauthentication_required"
    assert client.post(url, right | {"next": "/account/"}).url == "/account/"
    assert client.post("/api/keys", {"name": "k"}, "application/json").status_code == 201


def test_operators_can_be_required_to_enroll(client):
    User.objects.create_superuser("dev@example.com", PASSWORD)
    log_in(client)
    assert client.get("/operator/").status_code == 200
    with override_settings(OPERATORS_NEED_TOTP=True):
        for path in ("/operator/", "/", "/operator/users/"):
            assert client.get(path).url == "/account/mfa/totp/activate/", path
        response = client.get("/api/operator/tenants")
        assert (response.status_code, response.json()["code"]) == (403, "totp_required")
        enroll(client)
        assert client.get("/operator/").status_code == 200
        assert client.get("/api/operator/tenants").status_code == 200


def test_other_users_are_not_required_to_enroll(client, user):
    log_in(client)
    with override_settings(OPERATORS_NEED_TOTP=True):
        assert client.get("/t/acme/").status_code == 200


def test_a_forgotten_password_is_reset(client, user):
    assert client.get("/account/password/reset").status_code == 200
    for address in ("dev@example.com", "unknown@example.com"):
        assert client.post("/account/password/reset", {"email": address}).url == "/account/password/reset/sent"
    assert "Check your email" in client.get("/account/password/reset/sent").content.decode()
    (message,) = mail.outbox  # an address without a user receives none
    assert message.to == ["dev@example.com"]
    (path,) = re.findall(r"http://[^/]+(/account/password/reset/\S+)", message.body)
    url = client.get(path).url
    assert "New password" in client.get(url).content.decode()
    new = "another horse battery staple"
    assert client.post(url, {"password1": new, "password2": new}).status_code == 302
    assert "_auth_user_id" in (log_in(client, new) and client).session
    client.post("/logout")
    assert "has expired" in client.get(path, follow=True).content.decode()


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:1"])
def test_the_link_of_a_reset_is_of_the_public_url(client, user, settings, host):
    settings.MILLRACE = replace(settings.MILLRACE, public_url="https://llm.example.com:8443")
    headers = {"host": host, "x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}
    client.post("/account/password/reset", {"email": "dev@example.com"}, headers=headers)
    links = re.findall(r"https?://[^\s\"<]+", mail.outbox[0].body + html(mail.outbox[0]))
    assert len(links) >= 3
    assert {urlsplit(link).netloc for link in links} == {"llm.example.com:8443"}


@pytest.mark.parametrize("address", ["dev@example.com", "Dev@Example.com", "unknown@example.com"])
def test_a_reset_is_queued_also_for_an_unknown_address(client, user, monkeypatch, address):
    """The web job looks up the user, so that the time of the response shows nothing."""
    queued: list[str] = []
    monkeypatch.setattr(user_emails, "queue_password_reset_email", queued.append)
    assert client.post("/account/password/reset", {"email": address}).status_code == 302
    assert [each.lower() for each in queued] == [address.lower()]
    assert mail.outbox == []


@pytest.mark.parametrize("changes", [{"is_active": False}, {"email": "other@example.com"}])
def test_a_reset_of_a_user_without_access_sends_nothing(user, changes):
    User.objects.filter(pk=user.pk).update(**changes)
    user_emails.send_password_reset_email("dev@example.com")
    assert mail.outbox == []


def test_the_password_can_be_changed(client, user):
    log_in(client)
    new = "another horse battery staple"
    assert client.get("/account/password").status_code == 200
    sent = {"oldpassword": PASSWORD, "password1": new, "password2": new}
    assert client.post("/account/password", sent).status_code == 302
    user.refresh_from_db()
    assert user.check_password(new)
    assert len(unscoped(AuditEntry).filter(action="user.password_changed")) == 1


def test_there_is_no_self_service_sign_up(client):
    assert "No account found" in client.get("/account/signup").content.decode()
    client.post("/account/signup", {"email": "new@example.com", "password1": PASSWORD, "password2": PASSWORD})
    assert not User.objects.exists()
    assert "/account/signup" not in client.get("/login").content.decode()


def test_single_sign_on_has_a_button_if_there_is_a_provider(client, settings):
    import dataclasses

    assert "Our provider" not in client.get("/login").content.decode()
    chosen = {"oidc_issuer": "https://id.example.com", "oidc_name": "Our provider"}
    settings.MILLRACE = dataclasses.replace(settings.MILLRACE, **chosen)
    page = client.get("/login").content.decode()
    assert "Our provider" in page
    assert 'action="/account/oidc/sso/login/"' in page


@pytest.mark.parametrize("path", ["/login", "/account/", "/account/mfa/totp/activate/", "/account/password"])
def test_the_pages_follow_the_policy(client, user, path):
    if path != "/login":
        log_in(client)
    response = client.get(path)
    page = response.content.decode()
    assert response.status_code == 200
    assert response.headers["Content-Security-Policy"] == live.SECURITY_HEADERS["Content-Security-Policy"]
    assert "frontend/console.css" in page
    for inline in ("<script>", "<style", " style=", " onclick=", "javascript:"):
        assert inline not in page, inline
