"""Codes, links and forms that work once, sent several times at the same moment: one works, no answer is a 500."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django.core import mail
from django.core.cache import cache
from django.test import Client

from tenants import actions, invitations
from tenants.models import Invitation, Membership, User
from tests.support.frontend.soft_passkey import SoftPasskey
from tests.support.frontend.totp import current_code, next_code
from tests.support.rows import unscoped
from tests.support.tenants.concurrency import at_once

pytestmark = pytest.mark.django_db(transaction=True)
PASSWORD = "correct horse battery staple"
ENTER, ENTER_AGAIN = "/account/mfa/authenticate/", "/account/mfa/reauthenticate/"
TIMES = 4  # below the free attempts of an account


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    cache.clear()


@pytest.fixture
def user() -> User:
    return User.objects.create_user("dev@example.com", PASSWORD)


@pytest.fixture
def secret(user: User) -> str:
    secret = generate_totp_secret()
    TOTP.activate(user, secret)
    return secret


def visitor() -> Client:
    return Client(raise_request_exception=False)


def half_signed_in(user: User) -> Client:
    """Return a client whose second step of the sign-in is open."""
    client = visitor()
    client.post("/login", {"login": user.email, "password": PASSWORD})
    return client


def signed_in(user: User) -> Client:
    client = visitor()
    client.force_login(user)
    return client


def statuses(answers: list[Any]) -> Counter[int]:
    return Counter(answer.status_code for answer in answers)


def send(clients: list[Client], path: str, data: dict[str, str]) -> Counter[int]:
    """Send the same form from all clients at the same time."""
    return statuses(at_once(*(lambda client=client: client.post(path, data) for client in clients)))


ONCE = Counter({302: 1, 200: TIMES - 1})


@pytest.mark.parametrize("step", ["sign-in", "reauthentication"])
@pytest.mark.parametrize("kind", ["totp", "recovery"])
def test_a_code_sent_at_the_same_time_works_once(user, secret, step, kind):
    code = current_code(secret)
    if kind == "recovery":
        RecoveryCodes.activate(user)
        code = RecoveryCodes(Authenticator.objects.get(type="recovery_codes")).get_unused_codes()[0]
    if step == "sign-in":
        assert send([half_signed_in(user) for _ in range(TIMES)], ENTER, {"code": code}) == ONCE
    else:
        assert send([signed_in(user) for _ in range(TIMES)], ENTER_AGAIN, {"code": code}) == ONCE


def test_a_totp_code_works_once_in_all_steps(user, secret, monkeypatch):
    """Each pair of steps, and also an earlier code after a later one, in the 90 seconds in which codes are valid."""
    now = (time.time() // 30) * 30 + 10
    monkeypatch.setattr(time, "time", lambda: now)
    steps = {
        "sign-in": lambda code: half_signed_in(user).post(ENTER, {"code": code}),
        "again": lambda code: signed_in(user).post(ENTER_AGAIN, {"code": code}),
    }
    for first in steps:
        for second in steps:
            now += 120
            early = current_code(secret)
            assert steps[first](early).status_code == 302, (first, second)
            now += 31
            late = current_code(secret)
            for code, expected in ((early, 200), (late, 302), (late, 200), (early, 200)):
                cache.clear()  # allauth remembers a code for 30 seconds
                response = steps[second](code)
                assert response.status_code == expected, (first, second, code)
                assert expected == 302 or "already used" in response.content.decode()


def test_the_code_of_the_enrollment_does_not_sign_in(user):
    client = signed_in(user)
    client.post("/account/confirm", {"password": PASSWORD})
    (secret,) = re.findall(r"<code>(\w{16,})</code>", client.get("/account/mfa/totp/activate/").content.decode())
    code = current_code(secret)
    assert client.post("/account/mfa/totp/activate/", {"code": code}).status_code == 302
    cache.clear()
    assert half_signed_in(user).post(ENTER, {"code": code}).status_code == 200
    assert half_signed_in(user).post(ENTER, {"code": next_code(secret)}).status_code == 302


def test_enrollment_at_the_same_time(user):
    client = signed_in(user)
    client.post("/account/confirm", {"password": PASSWORD})
    (secret,) = re.findall(r"<code>(\w{16,})</code>", client.get("/account/mfa/totp/activate/").content.decode())
    sent = {"code": current_code(secret)}
    found = send([copy_of(client) for _ in range(TIMES)], "/account/mfa/totp/activate/", sent)
    assert found == {302: TIMES}  # the others are sent to the page of the device
    assert Counter(Authenticator.objects.values_list("type", flat=True)) == {"totp": 1, "recovery_codes": 1}


def test_new_recovery_codes_at_the_same_time(user, secret):
    client = signed_in(user)
    client.post(ENTER_AGAIN, {"code": current_code(secret)})
    found = send([copy_of(client) for _ in range(TIMES)], "/account/mfa/recovery-codes/generate/", {})
    assert found == {302: TIMES}
    assert Counter(Authenticator.objects.values_list("type", flat=True)) == {"totp": 1, "recovery_codes": 1}


def copy_of(client: Client) -> Client:
    """Return a client with the same session, as another tab of the browser."""
    copy = visitor()
    copy.cookies = client.cookies.copy()
    return copy


def join(invitation: Invitation, client: Client | None = None) -> Any:
    client = client or visitor()
    return client.post(f"/invitations/{invitations.token(invitation)}", {"name": "New", "password": PASSWORD})


def invite(slug: str) -> Invitation:
    actions.do_invite(actions.do_create_tenant(slug, slug), "new@example.com", "owner")
    (invitation,) = unscoped(Invitation).filter(tenant__slug=slug)
    return invitation


def test_an_invitation_accepted_at_the_same_time_by_a_new_user():
    invitation = invite("acme")
    answers = at_once(*(lambda: join(invitation) for _ in range(TIMES)))
    assert statuses(answers) == ONCE
    assert all("was used" in answer.content.decode() for answer in answers if answer.status_code == 200)
    assert len(unscoped(Membership).all()) == User.objects.count() == 1


def test_invitations_of_one_address_accepted_at_the_same_time():
    rows = [invite(slug) for slug in ("acme", "bolt", "core", "dyne")]
    answers = at_once(*(lambda row=row: join(row) for row in rows))
    assert statuses(answers) == ONCE
    assert all("created at the same time" in answer.content.decode() for answer in answers if answer.status_code == 200)
    user = User.objects.get()
    for answer, row in zip(answers, rows, strict=True):
        if answer.status_code == 200:
            assert join(row, signed_in(user)).status_code == 302  # still open
    assert len(unscoped(Membership).all()) == TIMES


def test_an_invitation_accepted_at_the_same_time_by_a_known_user():
    user = User.objects.create_user("new@example.com", PASSWORD)
    invitation = invite("acme")
    clients = [signed_in(user) for _ in range(TIMES)]
    answers = at_once(*(lambda client=client: join(invitation, client) for client in clients))
    assert statuses(answers) == ONCE
    assert all("was used" in answer.content.decode() for answer in answers if answer.status_code == 200)


def test_a_password_reset_link_at_the_same_time(user):
    visitor().post("/account/password/reset", {"email": user.email})
    (path,) = re.findall(r"http://[^/]+(/account/password/reset/\S+)", mail.outbox[0].body)
    clients = [visitor() for _ in range(TIMES)]
    urls = [client.get(path).url for client in clients]
    new = "another horse battery staple"
    found = send(clients, urls[0], {"password1": new, "password2": new})
    assert set(found) <= {200, 302}
    user.refresh_from_db()
    assert user.check_password(new)
    assert "has expired" in visitor().get(path, follow=True).content.decode()


def test_a_passkey_response_at_the_same_time(user, settings):
    settings.MILLRACE = replace(settings.MILLRACE, public_url="http://localhost:8000")
    passkey, client = SoftPasskey(counter=None), signed_in(user)
    client.post("/account/confirm", {"password": PASSWORD})
    page = client.get("/account/mfa/webauthn/add/").content.decode()
    (options,) = re.findall(r'data-options="([^"]*)"', page)
    sent = {"name": "Phone", "credential": passkey.create(json.loads(unescape(options)))}
    found = send([copy_of(client) for _ in range(TIMES)], "/account/mfa/webauthn/add/", sent)
    assert set(found) <= {200, 302}
    assert Counter(Authenticator.objects.values_list("type", flat=True)) == {"webauthn": 1, "recovery_codes": 1}
