"""Sign-in by OpenID Connect: which claims count, and what is refused with a reason."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from allauth.socialaccount.models import SocialAccount
from django.conf import settings as live
from django.test import Client

from tenants import actions
from tenants.models import User
from tests.support.frontend.identity_provider import (
    CLIENT_ID,
    LOGIN,
    IdentityProvider,
    Remove,
    finish,
    parameter,
    running,
    sign_in,
    start,
)
from tests.support.tenants.concurrency import at_once

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery staple"
LONG = "x" * 10_000


@pytest.fixture
def user() -> User:
    user = User.objects.create_user("dev@example.com", PASSWORD)
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), user, "admin")
    return user


@pytest.fixture
def client() -> Client:
    return Client(raise_request_exception=False)


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


@pytest.fixture
def linked(user: User) -> SocialAccount:
    return SocialAccount.objects.create(user=user, provider="sso", uid="u-1")


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the provider's configuration for each sign-in."""
    monkeypatch.setattr("frontend.accounts.openid_connect.DISCOVERY_SECONDS", 0)


VERIFIED = [True, "true"]
NOT_VERIFIED = [
    False,
    "false",
    "True",
    "TRUE",
    "1",
    "yes",
    1,
    2,
    1.0,
    [True],
    ["true"],
    {"a": 1},
    "",
    None,
    Remove,
    LONG,
]


@pytest.mark.parametrize("sent", [*VERIFIED, *NOT_VERIFIED], ids=lambda sent: repr(sent)[:20])
def test_only_true_is_a_verified_address(client, user, identity_provider, sent):
    identity_provider.claims["email_verified"] = sent
    response = sign_in(client, identity_provider)
    expected = any(sent is value or (isinstance(sent, str) and sent == value) for value in VERIFIED)
    assert is_signed_in(client) == expected
    assert SocialAccount.objects.exists() == expected
    assert response.status_code == (302 if expected else 200)
    assert expected or "No account found" in response.content.decode()


def test_an_address_counts_with_the_verification_of_the_same_answer(client, user, identity_provider):
    """A verified address of the ID token does not verify another one of userinfo."""
    identity_provider.changes["id_token"] = {"email": "other@example.com", "email_verified": True}
    identity_provider.changes["userinfo"] = {"email": "dev@example.com", "email_verified": Remove}
    sign_in(client, identity_provider)
    assert not is_signed_in(client)


@pytest.mark.parametrize("flags", [{"is_staff": True}, {"is_superuser": True}])
def test_an_operator_is_not_linked_by_an_address(client, identity_provider, flags):
    operator = User.objects.create_user("dev@example.com", PASSWORD, **flags)
    response = sign_in(client, identity_provider)
    assert not is_signed_in(client)
    assert not SocialAccount.objects.exists()
    assert "not linked by their email address" in response.content.decode()
    operator.refresh_from_db()
    assert operator.check_password(PASSWORD)
    SocialAccount.objects.create(user=operator, provider="sso", uid="u-1")
    assert sign_in(client, identity_provider).status_code == 302
    assert is_signed_in(client)


WRONG_TYPES: list[Any] = [Remove, None, "", "a\0b", "\ud800", LONG, 5, 1.5, True, ["u-1"], {"a": "b"}, []]
ENDPOINTS = ("authorization_endpoint", "token_endpoint")
FAR = int(time.time()) + 10**6


def _fields(answer: str, names: tuple[str, ...], values: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        for value in values:
            yield answer, {name: value}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    *_fields("discovery", (*ENDPOINTS, "issuer"), WRONG_TYPES),
    *_fields(
        "discovery", (*ENDPOINTS, "userinfo_endpoint"), ["http://id.example.com/x", "javascript:1", "//x", "ftp://x"]
    ),
    *_fields("discovery", ("userinfo_endpoint",), [value for value in WRONG_TYPES if value not in (Remove, None)]),
    *_fields("discovery", ("issuer",), ["https://id.example.com", "https://id.example.com/other"]),
    *_fields("token", ("access_token", "id_token"), [value for value in WRONG_TYPES if value != LONG]),
    *_fields("token", ("access_token",), ["ключ", "a b\r\nx: y"]),
    *_fields("token", ("id_token",), ["a.b.c", "a.b", "e30.e30.", "é.é.é"]),
    *_fields("id_token", ("sub", "iss", "aud", "exp", "nonce"), WRONG_TYPES),
    *_fields("id_token", ("exp",), [0, -1, 1e400, "tomorrow"]),
    *_fields("id_token", ("iat", "nbf"), [FAR, "x", 1e400, ["x"]]),
    *_fields("id_token", ("auth_time",), ["x", [5], {"a": 5}, True, -1, 1e400, 10**400]),
    *_fields("id_token", ("aud",), ["other", ["other"], [CLIENT_ID, "other"], [5], {CLIENT_ID: 1}]),
    *_fields("id_token", ("azp",), ["other", 5, [CLIENT_ID]]),
    *_fields("id_token", ("iss",), ["https://id.example.com", ["https://id.example.com"]]),
    *_fields("id_token", ("sub",), ["u-2", "x" * 192]),
    *_fields("userinfo", ("sub",), [*WRONG_TYPES, "u-2", "U-1"]),
    *_fields("userinfo", ("email",), [value for value in WRONG_TYPES if value not in (Remove, None, "")]),
]
REFUSED = [case for case in REFUSED if case != ("id_token", {"aud": [CLIENT_ID]})]


def test_an_odd_answer_is_a_page_with_a_reason(linked, identity_provider, uncached):
    cases = [(f"{answer}: {str(changes)[:60]}", {answer: changes}, {}) for answer, changes in REFUSED]
    assert len(cases) > 180
    assert _results(identity_provider, cases) == dict.fromkeys((case[0] for case in cases), "refused")


BODIES: list[tuple[int, bytes]] = [
    (0, b""),
    *((200, body) for body in (b"", b"[]", b"null", b"5", b'"x"', b"{", b"<html>", b"\xff\xfe", b"{}", b"a=b")),
    (200, b"[" * 100_000),
    (200, b'{"a":' * 50_000),
    (200, b'{"sub": NaN, "issuer": NaN, "access_token": NaN}'),
    (200, b'{"a": "' + b"x" * 1_000_000 + b'"}'),
    (204, b""),
    (302, b"http://127.0.0.1:1/"),
    (400, b'{"error": "invalid_grant"}'),
    (404, b"{}"),
    (500, b"{}"),
]


def test_an_unreadable_answer_is_a_page_with_a_reason(linked, identity_provider, uncached):
    answers = ("discovery", "token", "userinfo")
    cases = [(f"{answer}: {str(body)[:40]}", {}, {answer: body}) for answer in answers for body in BODIES]
    assert _results(identity_provider, cases) == dict.fromkeys((case[0] for case in cases), "refused")


def test_a_provider_that_does_not_run_is_a_page_with_a_reason(client, user, identity_provider, settings):
    settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"][0]["settings"] = {"server_url": "http://127.0.0.1:1"}
    _check_refused(client, sign_in(client, identity_provider))


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"code": "c"},
        {"state": "unknown", "code": "c"},
        {"error": "server_error"},
        {"error": "x", "error_description": LONG[:2000]},
    ],
)
def test_a_callback_without_its_sign_in_is_a_page_with_a_reason(client, user, identity_provider, sent):
    _check_refused(client, client.get(f"{LOGIN}callback/", sent))


def _results(identity_provider: IdentityProvider, cases: list[tuple[str, Any, Any]]) -> dict[str, str]:
    """Sign in once with each change of the provider's answers, and return what came of it."""
    results = {}
    for name, identity_provider.changes, identity_provider.bodies in cases:
        client = Client(raise_request_exception=False)
        response = sign_in(client, identity_provider)
        has_reason = 'role="alert"' in response.content.decode()
        states = {(401, True, False): "refused", (302, False, True): "signed in"}
        state = (response.status_code, has_reason, is_signed_in(client))
        results[name] = states.get(state, str(state))
    return results


def _check_refused(client: Client, response: Any) -> None:
    assert response.status_code == 401
    text = response.content.decode()
    assert "Sign-in failed" in text
    assert 'role="alert"' in text
    assert not is_signed_in(client)


ODD: list[Any] = ["a\0b", LONG, 5, ["u-1"], {"a": "b"}]
UNUSED: list[tuple[str, dict[str, Any]]] = [
    *_fields("userinfo", ("name", "preferred_username"), ODD),
    *_fields("discovery", ("token_endpoint_auth_methods_supported",), [*ODD, [5, ["x"]]]),
    *_fields("discovery", ("userinfo_endpoint",), [Remove, None]),
    *_fields("token", ("expires_in", "refresh_token"), [*ODD, Remove, 1e400]),
    ("token", {"access_token": LONG}),
    ("id_token", {"exp": 10**400}),
    *_fields("id_token", ("auth_time",), [None, 0, 1.5, 2**40]),
    ("id_token", {"aud": [CLIENT_ID]}),
    ("id_token", {"aud": [CLIENT_ID, "other"], "azp": CLIENT_ID}),
    ("id_token", {"email": Remove, "email_verified": Remove}),
    *_fields("userinfo", ("email",), ["not an address", None, ""]),
]


def test_fields_that_are_not_used_do_not_matter(linked, identity_provider, uncached):
    cases = [(f"{answer}: {str(changes)[:60]}", {answer: changes}, {}) for answer, changes in UNUSED]
    assert _results(identity_provider, cases) == dict.fromkeys((case[0] for case in cases), "signed in")


def test_the_nonce_belongs_to_one_sign_in(client, user, identity_provider):
    first, second = start(client, identity_provider), start(client, identity_provider)
    nonces = [parameter(response, "nonce") for response in (first, second)]
    assert None not in nonces
    assert len(set(nonces)) == 2
    assert finish(client, parameter(first, "state")).status_code == 401  # with an ID token of the second one
    assert finish(client, parameter(second, "state")).status_code == 302
    again = finish(client, parameter(second, "state"))  # a state works once
    assert again.status_code == 401


def test_the_provider_returns_to_the_public_url(client, identity_provider):
    response = client.post(LOGIN, headers={"host": "localhost:9999"})
    assert parameter(response, "redirect_uri") == f"{live.MILLRACE.base_url}{LOGIN}callback/"


def test_only_the_claims_that_are_used_are_stored(client, user, identity_provider):
    identity_provider.claims["picture"] = "https://id.example.com/p.png"
    sign_in(client, identity_provider)
    (row,) = SocialAccount.objects.all()
    assert row.extra_data == {"sub": "u-1", "email": "dev@example.com", "email_verified": True}


def test_discovery_is_cached_until_it_expires(client, user, identity_provider, monkeypatch):
    from frontend.accounts import openid_connect

    clock = time.monotonic()
    monkeypatch.setattr(openid_connect, "monotonic", lambda: clock)
    for _ in range(3):
        sign_in(client, identity_provider)
    assert identity_provider.requests.count("discovery") == 1
    clock += openid_connect.DISCOVERY_SECONDS + 1
    sign_in(client, identity_provider)
    assert identity_provider.requests.count("discovery") == 2
    with running() as other:  # the cache has one entry
        app = live.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"][0]
        app["settings"] = {"server_url": other.issuer}
        sign_in(client, other)
        app["settings"] = {"server_url": identity_provider.issuer}
    sign_in(client, identity_provider)
    assert identity_provider.requests.count("discovery") == 3


def test_a_refused_discovery_is_not_cached(client, user, identity_provider):
    identity_provider.bodies["discovery"] = (500, b"")
    assert sign_in(client, identity_provider).status_code == 401
    identity_provider.bodies.clear()
    assert sign_in(client, identity_provider).status_code == 302


def test_the_authorization_request(client, identity_provider):
    location = start(client, identity_provider).headers["Location"]
    sent = {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}
    assert set(sent["scope"].split()) == {"openid", "profile", "email"}
    assert (sent["response_type"], sent["code_challenge_method"]) == ("code", "S256")
    assert json.dumps(sent).count(CLIENT_ID) == 1


@pytest.mark.django_db(transaction=True)
def test_callbacks_that_link_one_account_at_the_same_time(user, identity_provider):
    clients = [Client(raise_request_exception=False) for _ in range(4)]
    started = [(client, start(client, identity_provider)) for client in clients]
    identity_provider.nonce = None
    acts = [
        lambda client=client, to=to: finish(client, parameter(to, "state"), parameter(to, "nonce") or "")
        for client, to in started
    ]
    answers = at_once(*acts)
    assert {answer.status_code for answer in answers} <= {302, 401}
    assert all("at the same time" in answer.content.decode() for answer in answers if answer.status_code == 401)
    assert SocialAccount.objects.count() == 1
    assert any(map(is_signed_in, clients))
