"""Passkeys: registration, sign-in as a second factor and without a password, and what is rejected."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django.conf import settings as live
from django.core.cache import cache
from django.test import Client

from frontend.accounts.passkeys import MAX_PASSKEYS, base_origin, relying_party_id
from tenants import actions
from tenants.models import AuditEntry, User
from tests.support.frontend.sessions import make_old
from tests.support.frontend.soft_passkey import SoftPasskey
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery staple"
BASE = "/account/mfa/webauthn"
LOGIN = f"{BASE}/login/"


@pytest.fixture(autouse=True)
def _on_localhost(settings: Any) -> None:
    cache.clear()
    settings.MILLRACE = replace(settings.MILLRACE, public_url="http://localhost:8000")


@pytest.fixture
def user() -> User:
    user = User.objects.create_user("dev@example.com", PASSWORD)
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), user, "admin")
    return user


def log_in(client: Client) -> Any:
    return client.post("/login", {"login": "dev@example.com", "password": PASSWORD})


def options_of(client: Client, path: str) -> dict[str, Any]:
    page = client.get(path).content.decode()
    (found,) = re.findall(r'data-options="([^"]*)"', page)
    options: dict[str, Any] = json.loads(unescape(found))
    return options


def login_options(client: Client) -> dict[str, Any]:
    response = client.get(LOGIN, headers={"x-requested-with": "XMLHttpRequest"})
    options: dict[str, Any] = response.json()["request_options"]
    return options


def register(client: Client, passkey: SoftPasskey, name: str = "Phone") -> Any:
    client.post("/account/confirm", {"password": PASSWORD})
    made = passkey.create(options_of(client, f"{BASE}/add/"))
    return client.post(f"{BASE}/add/", {"name": name, "credential": made})


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


@pytest.fixture
def passkey(client: Client, user: User) -> SoftPasskey:
    """A registered passkey of the user, who is signed out."""
    made = SoftPasskey()
    log_in(client)
    assert register(client, made).status_code == 302
    client.post("/logout")
    return made


def actions_of_audit() -> list[str]:
    return [entry.action for entry in unscoped(AuditEntry).filter(tenant_id=None, object_type="user")]


def test_a_passkey_is_added_with_recovery_codes_named_listed_and_removed(client, user):
    log_in(client)
    assert "Add passkey" in client.get("/account/").content.decode()
    response = register(client, SoftPasskey(), "Phone")
    assert response.url == "/account/mfa/recovery-codes/"
    assert len(re.findall(r"<li><code>", client.get(response.url).content.decode())) == 10
    (row,) = Authenticator.objects.filter(user=user, type="webauthn")
    assert "Phone" in client.get(f"{BASE}/").content.decode()
    assert "Manage passkeys" in client.get("/account/").content.decode()
    assert client.get(f"{BASE}/keys/{row.pk}/edit/").status_code == 200
    client.post(f"{BASE}/keys/{row.pk}/edit/", {"name": "Laptop"})
    assert "Laptop" in client.get(f"{BASE}/").content.decode()
    assert client.get(f"{BASE}/keys/{row.pk}/remove/").status_code == 200
    client.post(f"{BASE}/keys/{row.pk}/remove/")
    assert not Authenticator.objects.filter(user=user).exists()  # also no recovery codes
    assert {"user.passkey_added", "user.passkey_renamed", "user.passkey_removed"} <= set(actions_of_audit())


def test_adding_and_removing_require_a_recent_reauthentication(client, user, passkey):
    log_in(client)
    client.post("/account/mfa/authenticate/", {"credential": passkey.sign(authenticate_options(client))})
    (row,) = Authenticator.objects.filter(user=user, type="webauthn")
    make_old(client)
    for path in ("add/", f"keys/{row.pk}/edit/", f"keys/{row.pk}/remove/"):
        for response in (client.get(f"{BASE}/{path}"), client.post(f"{BASE}/{path}")):
            assert response.url.startswith(f"{BASE}/reauthenticate/?next="), path
    assert Authenticator.objects.filter(pk=row.pk).exists()
    # A password does not count, because it could remove the passkey.
    client.post("/account/confirm", {"password": PASSWORD})
    assert client.get(f"{BASE}/add/").status_code == 302


def authenticate_options(client: Client) -> dict[str, Any]:
    return options_of(client, "/account/mfa/authenticate/")


def test_a_passkey_is_the_second_step_of_a_sign_in(client, user, passkey):
    assert log_in(client).url == "/account/mfa/authenticate/"
    assert not is_signed_in(client)
    response = client.post("/account/mfa/authenticate/", {"credential": passkey.sign(authenticate_options(client))})
    assert response.url == "/"
    assert client.get("/t/acme/").status_code == 200
    assert Authenticator.objects.get(type="webauthn").data["sign_count"] == 1


def test_a_passkey_that_is_rejected_as_the_second_step_shows_an_error(client, user, passkey):
    log_in(client)
    used = passkey.sign(authenticate_options(client))
    client.get("/account/mfa/authenticate/")  # with a new challenge
    for credential in ("{}", used):
        response = client.post("/account/mfa/authenticate/", {"credential": credential})
        assert response.status_code == 200
        assert re.search(r'<div class="alert" role="alert"><p>[A-Z][^<]+</p>', response.content.decode()), credential
    assert not is_signed_in(client)


def test_a_recovery_code_replaces_the_passkey(client, user, passkey):
    codes = Authenticator.objects.get(user=user, type="recovery_codes").wrap().get_unused_codes()
    log_in(client)
    assert client.post("/account/mfa/authenticate/", {"code": codes[0]}).url == "/"
    make_old(client)
    response = client.post("/account/mfa/reauthenticate/", {"code": codes[1], "next": f"{BASE}/add/"})
    assert response.url == f"{BASE}/add/"
    assert client.get(f"{BASE}/add/").status_code == 200


def test_a_passkey_signs_in_without_a_password(client, user, passkey):
    page = client.get("/login?next=/t/acme/").content.decode()
    assert "Sign in with a passkey" in page
    response = client.post(LOGIN, {"credential": passkey.sign(login_options(client)), "next": "/t/acme/"})
    assert response.url == "/t/acme/"
    assert client.get("/t/acme/").status_code == 200


def test_an_office_signs_in_with_passkeys(user, passkey):
    """The sign-ins are from one address within a minute. Only the documented throttle counts."""
    for number in range(25):
        client = Client(REMOTE_ADDR="203.0.113.9")
        response = client.post(LOGIN, {"credential": passkey.sign(login_options(client))})
        assert (response.status_code, is_signed_in(client)) == (302, True), number


def test_a_sign_in_leads_to_no_other_site(client, passkey):
    sent = {"credential": passkey.sign(login_options(client)), "next": "https://elsewhere.example/"}
    assert client.post(LOGIN, sent).url == "/"


def test_a_passkey_without_user_verification_is_only_a_second_factor(client, user, passkey):
    passkey.is_verified = False
    client.post(LOGIN, {"credential": passkey.sign(login_options(client))})
    assert not is_signed_in(client)
    log_in(client)
    response = client.post("/account/mfa/authenticate/", {"credential": passkey.sign(authenticate_options(client))})
    assert response.url == "/"


def test_the_challenge_of_a_second_step_does_not_skip_user_verification(client, user, passkey):
    """A stolen passkey must not work without its PIN, by a challenge of the thief's own sign-in."""
    thief = User.objects.create_user("thief@example.com", PASSWORD)
    other, own = Client(), SoftPasskey()
    other.force_login(thief)
    other.post("/account/confirm", {"password": PASSWORD})
    register(other, own)
    client.post("/login", {"login": "thief@example.com", "password": PASSWORD})
    options = authenticate_options(client)
    session = client.session
    del session["account_login"]  # the second step has timed out, and its challenge is still there
    session.save()
    passkey.is_verified = False
    client.post(LOGIN, {"credential": passkey.sign(options)})
    assert not is_signed_in(client)


def test_a_challenge_works_once_and_only_in_its_session(client, user, passkey):
    options = login_options(client)
    sent = {"credential": passkey.sign(options)}
    stranger = Client()
    stranger.post(LOGIN, sent)
    assert not is_signed_in(stranger)
    login_options(stranger)  # another challenge
    stranger.post(LOGIN, sent)
    assert not is_signed_in(stranger)
    assert client.post(LOGIN, sent).url == "/"
    client.post("/logout")
    client.post(LOGIN, {"credential": passkey.sign(options)})
    assert not is_signed_in(client)


def test_a_wrong_response_uses_up_the_challenge(client, user, passkey):
    options = login_options(client)
    client.post(LOGIN, {"credential": SoftPasskey(user_handle=passkey.user_handle).sign(options)})
    client.post(LOGIN, {"credential": passkey.sign(options)})
    assert not is_signed_in(client)


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": "http://localhost:9000"},  # another port
        {"origin": "https://localhost:8000"},
        {"origin": "http://evil.localhost:8000"},
        {"origin": "https://evil.example"},
        {"host": "evil.example"},
    ],
)
def test_a_response_of_another_origin_is_rejected(client, user, passkey, changes):
    for name, value in changes.items():
        setattr(passkey, name, value)
    client.post(LOGIN, {"credential": passkey.sign(login_options(client))})
    assert not is_signed_in(client)
    log_in(client)
    page = client.post("/account/mfa/authenticate/", {"credential": passkey.sign(authenticate_options(client))})
    assert page.status_code == 200
    assert not is_signed_in(client)


def test_a_registration_of_another_origin_is_rejected(client, user):
    log_in(client)
    response = register(client, SoftPasskey(origin="http://localhost:9000"))
    assert response.status_code == 200
    assert "The passkey was not accepted" in response.content.decode()
    assert not Authenticator.objects.filter(user=user).exists()


def test_a_passkey_whose_counter_does_not_increase_is_rejected(client, user, passkey):
    for counter in (5, 2, 4):  # signs with 6, then with 3 and 5
        passkey.counter = counter
        client.post(LOGIN, {"credential": passkey.sign(login_options(client))})
        assert is_signed_in(client) == (counter == 5)
        client.post("/logout")
    assert actions_of_audit().count("user.passkey_rejected") == 2
    passkey.counter = 6
    assert client.post(LOGIN, {"credential": passkey.sign(login_options(client))}).url == "/"


def test_a_passkey_without_a_counter_works_again(client, user):
    passkey = SoftPasskey(counter=None)
    log_in(client)
    register(client, passkey)
    for _ in range(2):
        client.post("/logout")
        assert client.post(LOGIN, {"credential": passkey.sign(login_options(client))}).url == "/"


@pytest.mark.parametrize(
    "sent", ["", "{}", "[]", "null", '{"response": {}}', '{"id": 5}', "x", '{"a": "' + "x" * 30_000 + '"}']
)
def test_bad_responses_are_rejected(client, user, passkey, sent):
    login_options(client)
    response = client.post(LOGIN, {"credential": sent})
    assert response.status_code == 200
    assert 'role="alert"' in response.content.decode()
    assert not is_signed_in(client)
    log_in(client)
    authenticate_options(client)
    assert client.post("/account/mfa/authenticate/", {"credential": sent}).status_code == 200
    assert not is_signed_in(client)


@pytest.mark.parametrize("handle", ["", "AA", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5", "MA"])
def test_an_unknown_user_is_rejected(client, passkey, handle):
    passkey.user_handle = handle
    assert client.post(LOGIN, {"credential": passkey.sign(login_options(client))}).status_code == 200
    assert not is_signed_in(client)


def test_another_users_passkey_is_rejected(client, user, passkey):
    other = User.objects.create_user("other@example.com", PASSWORD)
    passkey.user_handle = _handle(other)
    client.post(LOGIN, {"credential": passkey.sign(login_options(client))})
    assert not is_signed_in(client)


def _handle(user: User) -> str:
    from allauth.account.utils import user_pk_to_url_str

    from tests.support.frontend.soft_passkey import encode

    return encode(user_pk_to_url_str(user).encode())


def test_a_deactivated_user_is_rejected(client, user, passkey):
    User.objects.filter(pk=user.pk).update(is_active=False)
    client.post(LOGIN, {"credential": passkey.sign(login_options(client))})
    assert not is_signed_in(client)


def test_wrong_responses_are_throttled(user, passkey):
    client, bad = Client(), SoftPasskey(user_handle=passkey.user_handle)  # an unknown device
    for _ in range(7):
        response = client.post(LOGIN, {"credential": bad.sign(login_options(client))})
        if response.status_code == 429:
            break
    assert "Too many failed attempts" in response.content.decode()
    assert int(response["retry-after"]) > 0
    assert client.post(LOGIN, {"credential": passkey.sign(login_options(client))}).status_code == 429
    assert not is_signed_in(client)


def test_a_form_is_continued_after_the_passkey(client, user, passkey):
    client.post(LOGIN, {"credential": passkey.sign(login_options(client))})
    make_old(client)
    response = client.post("/t/acme/members/invite", {"email": "new@example.com", "role": "developer"})
    assert response.url.startswith(f"{BASE}/reauthenticate/")
    options = options_of(client, response.url)
    wrong = client.post(response.url, {"credential": SoftPasskey().sign(options)})
    assert wrong.url.startswith(f"{BASE}/reauthenticate/")
    assert "not accepted" in client.get(wrong.url).content.decode()
    done = client.post(response.url, {"credential": passkey.sign(options_of(client, response.url))})
    assert not done.url.startswith("/account/mfa")
    records = client.session["account_authentication_methods"]
    assert records[-1]["type"] == "webauthn"


def test_the_number_of_passkeys_is_limited(client, user):
    log_in(client)
    register(client, SoftPasskey())
    (row,) = Authenticator.objects.filter(user=user, type="webauthn")
    Authenticator.objects.bulk_create(
        Authenticator(user=user, type="webauthn", data=row.data) for _ in range(MAX_PASSKEYS - 1)
    )
    assert client.get(f"{BASE}/add/").url == f"{BASE}/"
    assert "maximum of 10 passkeys" in client.get(f"{BASE}/").content.decode()


def test_passkeys_of_other_users_are_not_found(client, user, passkey):
    (row,) = Authenticator.objects.filter(user=user, type="webauthn")
    other = Client()
    User.objects.create_user("other@example.com", PASSWORD)
    other.post("/login", {"login": "other@example.com", "password": PASSWORD})
    other.post("/account/confirm", {"password": PASSWORD})
    for verb in ("edit", "remove"):
        assert other.get(f"{BASE}/keys/{row.pk}/{verb}/").status_code == 404
        assert other.post(f"{BASE}/keys/{row.pk}/{verb}/", {"name": "x"}).status_code == 404


def test_an_operator_completes_the_second_factor_with_a_passkey(client, settings):
    settings.OPERATORS_NEED_TOTP = True
    operator = User.objects.create_superuser("op@example.com", PASSWORD)
    client.post("/login", {"login": "op@example.com", "password": PASSWORD})
    assert client.get("/operator/").url.startswith("/account/mfa/totp/activate/")
    passkey = SoftPasskey()
    register(client, passkey)
    assert client.get("/operator/").status_code == 200  # this session is complete
    other = Client()
    other.force_login(operator)
    other_page = other.get("/operator/")
    assert other_page.url.startswith(f"{BASE}/reauthenticate/")
    other.post(other_page.url, {"credential": passkey.sign(options_of(other, other_page.url))})
    assert other.get("/operator/").status_code == 200


def test_users_with_a_passkey_count_as_protected(client, user, passkey):
    owner = User.objects.create_superuser("op@example.com", PASSWORD)
    operator = Client()
    operator.force_login(owner)
    (row,) = [row for row in operator.get("/api/operator/users").json()["results"] if row["email"] == "dev@example.com"]
    assert row["has_second_factor"] is True


def test_with_totp_and_a_passkey_both_pages_lead_to_each_other(client, user, passkey):
    TOTP.activate(user, generate_totp_secret())
    client.post(LOGIN, {"credential": passkey.sign(login_options(client))})
    assert f"{BASE}/reauthenticate/" in client.get("/account/mfa/reauthenticate/?next=/account/").content.decode()
    assert "/account/mfa/reauthenticate/" in client.get(f"{BASE}/reauthenticate/?next=/account/").content.decode()


@pytest.mark.parametrize(
    ("url", "host", "origin"),
    [
        ("https://llm.example.com", "llm.example.com", "https://llm.example.com"),
        ("https://llm.example.com:8443", "llm.example.com", "https://llm.example.com:8443"),
        ("https://llm.example.com:443", "llm.example.com", "https://llm.example.com"),
        ("http://localhost:8000", "localhost", "http://localhost:8000"),
        ("http://llm.example.com", "", "http://llm.example.com"),
        ("https://10.0.0.7", "", "https://10.0.0.7"),
    ],
)
def test_the_relying_party_is_the_host_of_the_public_url(settings, url, host, origin):
    settings.MILLRACE = replace(settings.MILLRACE, public_url=url)
    assert (relying_party_id(), base_origin()) == (host, origin)


def test_passkeys_are_not_offered_where_browsers_accept_none(client, user, settings):
    settings.MILLRACE = replace(settings.MILLRACE, public_url="http://10.0.0.7:8000")
    assert "passkey" not in client.get("/login").content.decode().lower()
    log_in(client)
    assert "Passkeys" not in client.get("/account/").content.decode()
    client.post("/account/confirm", {"password": PASSWORD})
    assert client.get(f"{BASE}/add/").status_code == 404
    assert "accept no passkeys for 10.0.0.7" in client.get(f"{BASE}/").content.decode()


def test_the_settings_name_the_forms_that_check_more() -> None:
    assert {name for name in live.MFA_FORMS if "webauthn" in name} == {
        *("authenticate_webauthn", "reauthenticate_webauthn", "login_webauthn", "add_webauthn", "edit_webauthn")
    }
