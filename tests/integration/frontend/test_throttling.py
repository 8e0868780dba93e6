"""Throttling of sign-ins, codes, reauthentication and password resets, and known devices."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django.conf import settings as live
from django.core import mail
from django.core.cache import cache
from django.test import Client, override_settings

from frontend.accounts import throttling
from millrace.environment.configuration import platform_settings
from tenants.login_throttle import ACCOUNT, DEVICE, Throttle
from tenants.models import User
from tests.support.frontend.console import remembered
from tests.support.frontend.totp import current_code

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery staple"
EMAIL = "dev@example.com"
ELSEWHERE = "203.0.113.9"


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Clock:
    """The throttle with a clock that only the test advances."""
    cache.clear()
    clock = Clock()
    throttle = Throttle(redis.Redis.from_url(platform_settings().valkey_url), clock)
    monkeypatch.setattr(throttling, "throttle", lambda: throttle)
    return clock


@pytest.fixture
def user() -> User:
    return User.objects.create_user(EMAIL, PASSWORD)


def log_in(client: Client, password: str = PASSWORD, address: str = "127.0.0.1") -> Any:
    return client.post("/login", {"login": EMAIL, "password": password}, REMOTE_ADDR=address)


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def attack(times: int, path: str = "/login", **fields: str) -> int:
    """Make wrong attempts, each from another address; return the number of unchecked ones."""
    refused = 0
    for n in range(times):
        sent = fields or {"login": EMAIL, "password": "wrong"}
        refused += Client().post(path, sent, REMOTE_ADDR=f"198.51.{n // 250}.{n % 250}").status_code == 429
    return refused


def test_the_waits_after_wrong_guesses_grow(client, user, clock):
    for _ in range(ACCOUNT.free):
        answer = log_in(client, "wrong")
        assert answer.status_code == 200 and "do not match" in answer.content.decode()
    for wait in (5, 10, 20):
        answer = log_in(client)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, str(wait))
        assert f"Try again in {wait} seconds." in answer.content.decode()
        clock.now += wait
        assert log_in(client, "wrong").status_code == 200
    assert not is_signed_in(client)
    clock.now += 40
    assert log_in(client).status_code == 302
    assert is_signed_in(client)


def test_an_attack_does_not_lock_out_a_known_device(client, user):
    log_in(client)
    client.post("/logout")
    assert attack(60) >= 50
    assert log_in(Client(), address=ELSEWHERE).status_code == 429  # a new device waits
    assert log_in(client).status_code == 302
    assert is_signed_in(client)


def test_a_blocked_address_lets_known_devices_through(client, user):
    log_in(client)
    client.post("/logout")
    for n in range(40):
        Client().post("/login", {"login": f"user{n}@example.com", "password": "wrong"})
    assert log_in(Client()).status_code == 429
    assert log_in(client).status_code == 302


def test_a_device_is_known_for_one_user_only(client, user):
    other = User.objects.create_user("other@example.com", PASSWORD)
    client.post("/login", {"login": other.email, "password": PASSWORD})
    client.post("/logout")
    held = client.cookies.pop(throttling.cookie_name(other)).value
    client.cookies[throttling.cookie_name(user)] = held
    attack(ACCOUNT.free)
    assert log_in(client).status_code == 429


def test_the_cookie_is_signed_with_the_attributes_of_the_sessions(client, user):
    name = throttling.cookie_name(user)
    log_in(client)
    cookie = client.cookies[name]
    assert (cookie["httponly"], cookie["samesite"], cookie["secure"]) == (True, live.SESSION_COOKIE_SAMESITE, "")
    assert int(cookie["max-age"]) > 300 * 24 * 3600
    with override_settings(SESSION_COOKIE_SECURE=True):
        again = Client()
        log_in(again)
        assert again.cookies[name]["secure"]
    client.post("/logout")
    client.cookies[name] = cookie.value[:-1] + ("A" if cookie.value[-1] != "A" else "B")
    attack(ACCOUNT.free)
    assert log_in(client).status_code == 429


def test_a_failed_or_incomplete_sign_in_makes_no_device_known(client, user):
    log_in(client, "wrong")
    TOTP.activate(user, generate_totp_secret())
    assert log_in(client).url == "/account/mfa/authenticate/"
    assert throttling.cookie_name(user) not in client.cookies


def test_a_new_password_makes_other_devices_unknown(client, user):
    old, new, name = Client(), "another horse battery staple", throttling.cookie_name(user)
    log_in(old)
    old.post("/logout")
    log_in(client)
    before = client.cookies[name].value
    sent = {"oldpassword": PASSWORD, "password1": new, "password2": new}
    assert client.post("/account/password", sent).status_code == 302
    assert client.cookies[name].value != before
    client.post("/logout")
    attack(ACCOUNT.free)
    assert log_in(old, new).status_code == 429
    assert log_in(client, new).status_code == 302


def test_codes_are_throttled_separately_from_passwords(client, user, clock):
    secret = generate_totp_secret()
    TOTP.activate(user, secret)
    log_in(client)
    url = "/account/mfa/authenticate/"
    for _ in range(ACCOUNT.free):
        assert client.post(url, {"code": "000000"}).status_code == 200
    response = client.post(url, {"code": current_code(secret)})
    assert (response.status_code, response.headers["Retry-After"]) == (429, "5")
    clock.now += 5
    assert client.post(url, {"code": current_code(secret)}).status_code == 302
    assert is_signed_in(client)
    known = client
    known.post("/logout")
    guessing = Client()
    log_in(guessing, address=ELSEWHERE)
    for _ in range(3 * ACCOUNT.free):
        guessing.post(url, {"code": "000000"}, REMOTE_ADDR=ELSEWHERE)
    log_in(known)
    assert known.post(url, {"code": "000000"}).status_code == 200  # checked, since the device is known


@pytest.mark.parametrize("totp", [False, True])
def test_reauthentication_is_throttled_only_by_session(client, user, clock, totp):
    """Attacks from other addresses or with another session do not delay it."""
    secret = generate_totp_secret()
    client.force_login(user)
    session = client.session
    session["account_authentication_methods"] = [{"method": "password", "at": time.time() - 3600}]
    session.save()
    if totp:
        TOTP.activate(user, secret)
    url, wrong = ("/account/mfa/reauthenticate/", {"code": "0"}) if totp else ("/account/confirm", {"password": "x"})
    thief = Client()
    thief.force_login(user)
    for _ in range(DEVICE.free):
        assert thief.post(url, wrong, REMOTE_ADDR=ELSEWHERE).status_code == 200
    answer = thief.post(url, wrong, REMOTE_ADDR=ELSEWHERE)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
    attack(2 * ACCOUNT.free)
    assert client.post(url, wrong).status_code == 200
    assert client.post(url, {"code": current_code(secret)} if totp else {"password": PASSWORD}).status_code == 302


def test_guesses_of_the_old_password_are_throttled(client, user):
    client.force_login(user)
    remembered(client.session)
    sent = {"oldpassword": "x", "password1": "another horse battery", "password2": "another horse battery"}
    for _ in range(DEVICE.free):
        assert client.post("/account/password", sent).status_code == 200
    assert client.post("/account/password", sent | {"oldpassword": PASSWORD}).status_code == 429
    user.refresh_from_db()
    assert user.check_password(PASSWORD)


@pytest.mark.parametrize("email", [EMAIL, "unknown@example.com"])
def test_password_resets_are_throttled_with_and_without_a_user(client, user, email):
    log_in(client)
    client.post("/logout")
    for n in range(ACCOUNT.free):
        answer = Client().post("/account/password/reset", {"email": email}, REMOTE_ADDR=f"198.51.100.{n}")
        assert answer.status_code == 302
    sent = len(mail.outbox)
    answer = Client().post("/account/password/reset", {"email": email})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
    assert len(mail.outbox) == sent
    if email == EMAIL:
        assert client.post("/account/password/reset", {"email": email}).status_code == 302


@pytest.mark.parametrize(
    ("seconds", "words"), [(1, "1 second"), (119, "119 seconds"), (121, "3 minutes"), (900, "15 minutes")]
)
def test_the_text_of_waits(seconds, words):
    assert throttling.in_words(seconds) == words
