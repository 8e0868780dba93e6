"""A session without a recent sign-in changes no password, second factor or identity, on any route."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any

import allauth
import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from allauth.socialaccount.models import SocialAccount
from django.core.cache import cache
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import translation

from frontend.accounts.change_emails import CHANGES
from tenants import actions
from tenants.api.views import TenantView
from tenants.models import AuditEntry, Invitation, User
from tenants.permissions import STEP_UP
from tenants.tasks import send_user_email
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.frontend.identity_provider import IdentityProvider
from tests.support.frontend.paths import example_path, paths
from tests.support.frontend.sessions import make_old
from tests.support.frontend.soft_passkey import SoftPasskey
from tests.support.frontend.totp import current_code
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
EMAIL = "dev@example.com"
NEW = "another horse battery staple"
KEY = "/account/mfa/webauthn/keys/1/"
# Routes below /account that an old session may use, and why they give no access. Every other route is guarded.
OPEN = {
    "/account/": "shows the account and changes the name",
    "/account/alerts": "changes emails of alerts",
    "/account/sessions/end": "ends sessions",
    "/account/inactive": "a text",
    "/account/signed-in": "shows the user and the CSRF token",
    "/account/signup": "a text: there is no sign-up",
    "/account/confirm": "re-authentication by the password",
    "/account/mfa/": "shows which factors exist",
    "/account/mfa/authenticate/": "a step of a sign-in",
    "/account/mfa/reauthenticate/": "re-authentication by a code",
    "/account/mfa/webauthn/": "shows the names of passkeys",
    "/account/mfa/webauthn/login/": "sign-in by a passkey",
    "/account/mfa/webauthn/reauthenticate/": "re-authentication by a passkey",
    "/account/password/reset": "emails a link to the user",
    "/account/password/reset/sent": "a text",
    "/account/password/reset/done": "a text",
    "/account/password/reset/sso-sso": "needs the emailed link",
    "/account/oidc/sso/login/": "redirects to the provider",
    "/account/oidc/sso/login/callback/": "needs the provider; test_identities.py has its processes",
    "/account/social/cancelled": "a text",
    "/account/social/error": "a text",
    "/account/social/unknown": "a text: there is no sign-up",
}
GUARDED = sorted({path for path in paths() if path.startswith("/account")} - OPEN.keys())
# Emails of allauth for what no page offers: addresses cannot be changed, and confirmed, and there is no sign-up.
UNREACHABLE = {"email_changed", "email_confirm", "email_deleted"}


@dataclass
class Person:
    """A signed-in user, and the page of the user's re-authentication."""

    user: User
    client: Client
    page: str

    def credentials(self) -> list[Any]:
        """Return everything that the user can sign in with."""
        self.user.refresh_from_db()
        tables = (
            Authenticator.objects.values_list("pk", "type", "data"),
            SocialAccount.objects.values_list("pk", "uid"),
            EmailAddress.objects.values_list("email", "verified"),
        )
        return [self.user.password, *(sorted(rows.filter(user=self.user), key=str) for rows in tables)]

    def path(self, path: str) -> str:
        """Return the path with the ID of the user's passkey."""
        row = Authenticator.objects.filter(user=self.user, type=Authenticator.Type.WEBAUTHN).first()
        return path.replace("/keys/1/", f"/keys/{row.pk}/") if row else path

    def form(self) -> dict[str, str]:
        """Return fields that all forms accept, except those of a re-authentication."""
        account = SocialAccount.objects.filter(user=self.user).first()
        sent = {"oldpassword": PASSWORD, "password1": NEW, "password2": NEW, "name": "x", "email": self.user.email}
        return sent | {"code": "000000", "credential": "{}", "account": str(account.pk if account else "")}


@pytest.fixture
def people(settings: Any, identity_provider: IdentityProvider) -> list[Person]:
    """One user for each way to reauthenticate, on a platform that offers passkeys."""
    settings.MILLRACE = replace(settings.MILLRACE, public_url="http://localhost:8000")
    found = []
    for name, page in (
        ("password", "/account/confirm"),
        ("provider", "/account/confirm"),
        ("totp", "/account/mfa/reauthenticate/"),
        ("passkey", "/account/mfa/webauthn/reauthenticate/"),
    ):
        user = User.objects.create_user(f"{name}@example.com", None if name == "provider" else PASSWORD)
        SocialAccount.objects.create(user=user, provider="sso", uid=name)
        if name == "totp":
            TOTP.activate(user, generate_totp_secret())
            RecoveryCodes.activate(user)
        client = Client()
        client.force_login(user)
        remembered(client.session)
        if name == "passkey":
            page_of_add = client.get("/account/mfa/webauthn/add/").content.decode()
            options = json.loads(unescape(re.findall(r'data-options="([^"]*)"', page_of_add)[0]))
            client.post("/account/mfa/webauthn/add/", {"name": "Phone", "credential": SoftPasskey().create(options)})
        make_old(client)
        found.append(Person(user, client, page))
    return found


def test_every_route_below_account_is_open_or_guarded() -> None:
    assert OPEN.keys() <= set(paths()), "remove the routes that no longer exist from OPEN"
    assert len(GUARDED) > 10, GUARDED


def test_an_old_session_changes_no_credential(people: list[Person]) -> None:
    for person in people:
        before = person.credentials()
        for path in (*GUARDED, *OPEN):
            cache.clear()  # throttled attempts
            if path == "/account/sessions/end":
                continue  # of the other clients
            for send in (person.client.get, person.client.post):
                response = send(person.path(path), person.form())
                # Not found are the codes of a user without codes, and not allowed is a form of a page that has none.
                if path in GUARDED and response.status_code not in (404, 405):
                    assert response.status_code == 302, (person.user, path)
                    assert response.url.startswith(f"{person.page}?next="), (person.user, path, response.url)
                assert person.credentials() == before, (person.user, path)


def test_each_guarded_route_works_with_a_recent_sign_in(people: list[Person]) -> None:
    for path in GUARDED:
        statuses = []
        for person in people:
            _sign_in(person)
            statuses.append(person.client.get(person.path(path)).status_code)
        assert 200 in statuses, (path, statuses)


def _sign_in(person: Person) -> None:
    """Record the user's second factor, or the password or provider, as used now."""
    remembered(person.client.session)
    factor = Authenticator.objects.filter(user=person.user).exclude(type="recovery_codes").first()
    if factor is not None:
        session = person.client.session
        record = session["account_authentication_methods"][0] | {"method": "mfa", "id": factor.pk}
        session["account_authentication_methods"] = [record]
        session.save()


def test_a_sign_in_counts_as_recent(client: Client) -> None:
    User.objects.create_user(EMAIL, PASSWORD)
    client.post("/login", {"login": EMAIL, "password": PASSWORD})
    assert client.get("/account/mfa/totp/activate/").status_code == 200
    assert client.get("/account/password").status_code == 200


def _tenant_routes() -> Iterator[tuple[str, str]]:
    """Yield the method and path of each request to a tenant's API whose permission requires a recent sign-in."""

    def walk(patterns: list[Any], before: str) -> Iterator[tuple[str, URLPattern]]:
        for pattern in patterns:
            if isinstance(pattern, URLResolver):
                yield from walk(pattern.url_patterns, before + str(pattern.pattern))
            else:
                yield before + str(pattern.pattern), pattern

    for route, pattern in walk(get_resolver().url_patterns, ""):
        view = getattr(pattern.callback, "cls", None)
        if view is not None and issubclass(view, TenantView):
            for method, permission in view.permissions.items():
                if permission in STEP_UP:
                    yield method, example_path(route)


def test_the_api_refuses_an_old_session(client: Client) -> None:
    owner = User.objects.create_user(EMAIL, PASSWORD)
    actions.do_create_tenant("acme", "Acme", owner=owner)
    operator = User.objects.create_superuser("op@example.com", PASSWORD)
    of_operators = [
        (method, path)
        for path in paths()
        if path.startswith("/api/operator/")
        for method in ("POST", "PUT", "PATCH", "DELETE")
    ]
    refused = {}
    for user, routes in ((owner, [*_tenant_routes()]), (operator, of_operators)):
        client.force_login(user)
        remembered(client.session)
        make_old(client)
        refused[user.email] = 0
        for method, path in routes:
            response = client.generic(method, path, "{}", content_type="application/json")
            if response.status_code != 405:
                assert (response.status_code, response.json()["code"]) == (403, "reauthentication_required"), path
                refused[user.email] += 1
    assert refused[EMAIL] > 20 and refused["op@example.com"] > 40, refused


def test_a_form_of_an_old_session_is_not_submitted_by_another_reauthentication(client: Client) -> None:
    """Otherwise the user who reauthenticates for something else would submit the form of a thief of the session."""
    owner = User.objects.create_user(EMAIL, PASSWORD)
    actions.do_create_tenant("acme", "Acme", owner=owner)
    client.post("/login", {"login": EMAIL, "password": PASSWORD})
    make_old(client)
    client.post("/t/acme/members/invite", {"email": "thief@example.com", "role": "admin"})
    page = client.get("/account/mfa/totp/activate/").url
    response = client.post(page, {"password": PASSWORD, "next": "/account/mfa/totp/activate/"})
    assert client.get(response.url).status_code == 200
    client.get("/t/acme/members/invite")
    assert unscoped(Invitation).filter(email="thief@example.com") == []


def test_a_password_is_not_stored_in_the_session(client: Client) -> None:
    User.objects.create_user(EMAIL, PASSWORD)
    client.post("/login", {"login": EMAIL, "password": PASSWORD})
    make_old(client)
    client.post("/account/password", {"oldpassword": PASSWORD, "password1": NEW, "password2": NEW})
    assert not re.search(f"{NEW}|{PASSWORD}", repr(dict(client.session)))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, mailoutbox: list[Any]) -> list[Any]:
    """The emails of changes, which a web job would send."""

    def send(task: str, arguments: list[Any], **options: Any) -> None:
        assert task == "tenants.send_user_email"
        with translation.override("en"):  # a job has no language of its own
            send_user_email(*arguments)

    monkeypatch.setattr("millrace.conf.celery.app.send_task", send)
    return mailoutbox


def test_each_change_of_a_password_or_second_factor_is_emailed_and_recorded(
    client: Client, sent: list[Any], django_capture_on_commit_callbacks: Any
) -> None:
    user = User.objects.create_user(EMAIL, PASSWORD)
    client.post("/login", {"login": EMAIL, "password": PASSWORD})
    secret = re.findall(r"<code>(\w{16,})</code>", client.get("/account/mfa/totp/activate/").content.decode())[0]
    steps = [
        ("post", "/account/mfa/totp/activate/", {"code": current_code(secret)}, "totp_activated"),
        ("get", "/account/mfa/recovery-codes/", {}, "recovery_codes_viewed"),
        ("get", "/account/mfa/recovery-codes/download/", {}, "recovery_codes_viewed"),
        ("post", "/account/mfa/recovery-codes/generate/", {}, "recovery_codes_generated"),
        ("post", "/account/mfa/totp/deactivate/", {}, "totp_deactivated"),
        (
            *("post", "/account/password"),
            {"oldpassword": PASSWORD, "password1": NEW, "password2": NEW},
            "password_changed",
        ),
    ]
    for method, path, form, change in steps:
        _check_emailed(client, user, sent, django_capture_on_commit_callbacks, (method, path, form, change))
    user.set_unusable_password()
    user.save()
    client.force_login(user)
    remembered(client.session)
    step = ("post", "/account/password/set", {"password1": PASSWORD, "password2": PASSWORD}, "password_set")
    _check_emailed(client, user, sent, django_capture_on_commit_callbacks, step)
    client.logout()
    client.post("/account/password/reset", {"email": EMAIL})
    (link,) = re.findall(r"http://[^/]+(/account/password/reset/\S+)", sent.pop().body)
    step = ("post", client.get(link).url, {"password1": NEW, "password2": NEW}, "password_reset")
    _check_emailed(client, user, sent, django_capture_on_commit_callbacks, step)


def _check_emailed(
    client: Client, user: User, sent: list[Any], capture: Any, step: tuple[str, str, dict[str, str], str]
) -> None:
    """Send the request of a step, and check its only email and the actor of its only audit entry."""
    method, path, form, change = step
    sent.clear()
    seen = len(unscoped(AuditEntry).filter(action=f"user.{change}"))
    # allauth reports some changes after the commit, which the test runs after the request.
    with translation.override("de"), capture(execute=True):
        response = getattr(client, method)(path, form, headers={"accept-language": "de", "user-agent": "Firefox/140"})
    assert response.status_code in (200, 302), path
    (message,) = sent
    with translation.override("de"):
        subject, text = (str(part) for part in CHANGES[change])
    assert subject != CHANGES[change][0] and text in message.body and message.subject == subject, change
    assert message.to == [EMAIL]
    assert "Wenn Sie das nicht waren" in message.body
    assert "http://" in message.body and "IP-Adresse: 127.0.0.1" in message.body
    entries = unscoped(AuditEntry).filter(action=f"user.{change}")
    assert len(entries) == seen + 1, change
    assert {entry.actor_user_id for entry in entries} == {user.pk}


def test_all_emails_of_allauth_about_changes_have_a_text() -> None:
    found = set()
    for path in Path(allauth.__file__).parent.rglob("*.py"):
        if not path.is_relative_to(Path(allauth.__file__).parent / "headless"):
            called = re.findall(r"send_notification_mail\(\s*\"([\w/]+)\"", path.read_text(encoding="utf-8"))
            found |= {name.rpartition("/")[2].replace("webauthn", "passkey") for name in called}
    assert found - UNREACHABLE == CHANGES.keys() - {"recovery_codes_viewed"}


def test_an_operator_who_sets_a_password_emails_the_user(
    sent: list[Any], django_capture_on_commit_callbacks: Any
) -> None:
    user = User.objects.create_user(EMAIL, PASSWORD)
    with django_capture_on_commit_callbacks(execute=True):
        password = actions.do_reset_password(user)
    (message,) = sent
    assert (message.to, message.subject) == ([EMAIL], "Password reset")
    assert password not in message.body
