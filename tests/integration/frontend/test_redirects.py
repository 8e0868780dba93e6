"""Redirects to URLs from requests stay on the site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django.conf import settings
from django.core.cache import cache
from django.test import Client

from tenants import actions
from tenants.models import Tenant, User
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.frontend.paths import ADMIN_URLS, paths
from tests.support.frontend.site_urls import OTHER_SITES, leaves_site
from tests.support.frontend.totp import current_code

pytestmark = [pytest.mark.django_db, pytest.mark.urls(ADMIN_URLS)]
ORIGIN = "http://testserver"
EMAIL = "op@example.com"
PROBE = "/t/acme/?probe=1"
SPELLINGS = OTHER_SITES[::2]
# Some of the places that follow a URL of the request. The test finds the others.
PLACES = {
    ("anonymous", "POST", "/login"),
    ("anonymous", "POST", "/logout"),
    ("anonymous", "POST", "/preferences"),
    ("operator", "POST", "/account/confirm"),
    ("operator", "POST", "/login"),
    ("operator", "POST", "/logout"),
    ("operator", "POST", "/preferences"),
}


@pytest.fixture
def operator() -> User:
    return User.objects.create_superuser(EMAIL, PASSWORD)


def target(response: Any) -> str:
    return str(response.headers.get("Location") or response.headers.get("HX-Redirect") or "")


class UserSession:
    """A user's session, replaced after a response that changes it. A login takes longer than most requests."""

    def __init__(self, user: User) -> None:
        self._user = user
        self._key = ""

    def sign_in(self, client: Client) -> None:
        if not self._key:
            client.force_login(self._user)
            self._key = client.cookies[settings.SESSION_COOKIE_NAME].value
        client.cookies[settings.SESSION_COOKIE_NAME] = self._key

    def note(self, response: Any) -> None:
        if settings.SESSION_COOKIE_NAME in response.cookies:
            self._key = ""


def send(session: UserSession | None, method: str, path: str, url: str, **fields: str) -> str:
    """Send the URL in all places of a request, and return the URL of the redirect."""
    client = Client(raise_request_exception=False)
    if session is not None:
        session.sign_in(client)
    headers = {"referer": ORIGIN + url, "HX-Current-URL": ORIGIN + url, "HX-Request": "true"}
    names = ("next", "url", "to", "return", "return_to", "redirect", "redirect_to", "back", "then")
    sent: dict[str, Any] = dict.fromkeys(names, url) | fields
    query = urlencode({"next": url})
    if method == "GET":
        response = client.get(path, sent, headers=headers)
    else:
        response = client.post(f"{path}?{query}", sent, headers=headers)
    if session is not None:
        session.note(response)
    return target(response)


def assert_on_site(location: str, spelling: str) -> None:
    assert not leaves_site(location), (spelling, location)
    if not location.startswith("/t/"):  # a page with `next`, which follows it later
        for value in parse_qs(urlsplit(location).query).get("next", []):
            assert not leaves_site(value), (spelling, location)


def test_each_place_that_follows_a_url_of_the_request(operator: User, acme: Tenant) -> None:
    """The places are found by a request to each path, and all spellings are sent to them."""
    secrets = dict.fromkeys(("password", "password1", "password2", "oldpassword"), PASSWORD)
    fields = secrets | dict.fromkeys(("login", "username", "email"), EMAIL)
    found = set()
    sessions: dict[str, UserSession | None] = {"operator": UserSession(operator), "anonymous": None}
    for path in paths(ADMIN_URLS):
        for role in ("operator",) if path.startswith("/api/") else sessions:
            for method in ("GET", "POST"):
                cache.clear()  # throttles
                location = send(sessions[role], method, path, PROBE, **fields)
                assert_on_site(location, PROBE)
                if location.removeprefix(ORIGIN) == PROBE:
                    found.add((role, method, path))
    assert found >= PLACES
    for number, (role, method, path) in enumerate(sorted(found)):
        for spelling in SPELLINGS[number % 5 :: 5]:
            cache.clear()
            assert_on_site(send(sessions[role], method, path, spelling, **fields), spelling)


def admin_login(client: Client, operator: User, acme: Tenant, url: str) -> Any:
    return client.get("/operator/django-admin/login/", {"next": url})


def impersonation(client: Client, operator: User, acme: Tenant, url: str) -> Any:
    client.force_login(operator)
    query = urlencode({"next": f"/t/acme/{url}"})
    return client.post(f"/operator/tenants/{acme.pk}/view?{query}", {"reason": "ticket 12"})


def second_factor(client: Client, operator: User, acme: Tenant, url: str) -> Any:
    secret = generate_totp_secret()
    TOTP.activate(operator, secret)
    client.force_login(operator)
    response = client.post("/account/mfa/reauthenticate/", {"code": current_code(secret), "next": url})
    operator.authenticator_set.all().delete()
    return response


def page_of_a_panel(client: Client, operator: User, acme: Tenant, url: str) -> Any:
    return client.get("/t/acme/", headers={"HX-Request": "true", "HX-Current-URL": ORIGIN + url})


def own_path(client: Client, operator: User, acme: Tenant, url: str) -> Any:
    path = url if url.startswith("/") else f"/{url}"
    return client.request(PATH_INFO=path.encode().decode("latin-1"))


@pytest.mark.parametrize("place", [admin_login, impersonation, second_factor, page_of_a_panel, own_path])
def test_places_with_conditions_of_their_own(
    operator: User, acme: Tenant, place: Callable[[Client, User, Tenant, str], Any]
) -> None:
    for spelling in SPELLINGS:
        cache.clear()
        client = Client(raise_request_exception=False)
        assert_on_site(target(place(client, operator, acme, spelling)), spelling)


@pytest.mark.parametrize("path", ["/account/password", "/account/password/set"])
def test_a_changed_password_redirects_to_this_site(operator: User, path: str) -> None:
    for spelling in SPELLINGS[::8]:
        cache.clear()
        if path.endswith("set"):
            operator.set_unusable_password()
        else:
            operator.set_password(PASSWORD)
        operator.save()
        client = Client()
        client.force_login(operator)
        remembered(client.session)
        new = "another battery staple"
        sent = {"oldpassword": PASSWORD, "password1": new, "password2": new, "next": spelling}
        assert_on_site(target(client.post(path, sent)), spelling)


def test_a_member_is_redirected_back_to_a_url_of_this_site(client: Client, acme: Tenant) -> None:
    user = User.objects.create_user("ada@example.com", PASSWORD)
    actions.do_add_member(acme, user, "owner")
    url = "/t/acme/models/org%2Fmodel?q=%2F%2Fevil.test"
    sent = {"login": "ada@example.com", "password": PASSWORD, "next": url}
    assert client.post("/login", sent).url == url
