"""Identities at the OpenID Connect provider: the first sign-in, connecting, and re-authentication by a round trip."""

from __future__ import annotations

import time

import pytest
from allauth.account.models import EmailAddress
from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.test import Client

from tenants import actions
from tenants.models import AuditEntry, Invitation, User
from tests.support.frontend.console import PASSWORD
from tests.support.frontend.identity_provider import IdentityProvider, sign_in
from tests.support.frontend.sessions import make_old
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
EMAIL = "dev@example.com"
CONFIRM = "/account/confirm?next="


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The users and subjects of the emails that are queued."""
    found: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "millrace.conf.celery.app.send_task", lambda _, given, **options: found.append((given[0], given[1]))
    )
    return found


@pytest.fixture
def user() -> User:
    user = User.objects.create_user(EMAIL, PASSWORD)
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), user, "owner")
    return user


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def entries(action: str) -> list[AuditEntry]:
    return [*unscoped(AuditEntry).filter(action=action)]


def test_the_first_sign_in_keeps_the_password_and_the_sessions_and_is_reported(
    client, user, identity_provider, queued, django_capture_on_commit_callbacks
):
    other = Client()
    other.post("/login", {"login": EMAIL, "password": PASSWORD})
    assert other.get("/account/").status_code == 200  # it is listed
    with django_capture_on_commit_callbacks(execute=True):
        sign_in(client, identity_provider)
    assert is_signed_in(client)
    user.refresh_from_db()
    assert user.check_password(PASSWORD)
    assert other.get("/account/").status_code == 200
    (entry,) = entries("user.account_connected")
    assert (entry.actor, entry.actor_user_id, entry.object_name) == (EMAIL, user.pk, EMAIL)
    assert entry.after == {"provider": "sso", "uid": "u-1"}
    assert queued == [(user.pk, "Sign-in provider connected")]
    sign_in(Client(), identity_provider)
    assert len(entries("user.account_connected")) == 1


def test_a_deactivated_user_is_refused_before_anything_is_linked(client, user, identity_provider):
    User.objects.filter(pk=user.pk).update(is_active=False)
    assert sign_in(client, identity_provider).url == "/account/inactive"
    assert not is_signed_in(client)
    assert not SocialAccount.objects.exists()
    assert entries("user.account_connected") == []
    user.refresh_from_db()
    assert user.check_password(PASSWORD)


def test_an_identity_is_connected_only_with_a_recent_sign_in(client, user, identity_provider):
    identity_provider.claims |= {"sub": "thief", "email": "thief@example.com"}
    client.post("/login", {"login": EMAIL, "password": PASSWORD})
    make_old(client)
    assert sign_in(client, identity_provider, process="connect").url == f"{CONFIRM}%2Faccount%2Fsocial%2F"
    assert not SocialAccount.objects.exists()
    # The refused identity is not connected by the re-authentication that follows.
    client.post("/account/confirm", {"password": PASSWORD, "next": "/account/social/"})
    assert not SocialAccount.objects.exists()
    sign_in(client, identity_provider, process="connect")
    (account,) = SocialAccount.objects.all()
    assert (account.user, account.uid) == (user, "thief")
    make_old(client)
    response = client.post("/account/social/", {"account": account.pk})
    assert response.url == f"{CONFIRM}%2Faccount%2Fsocial%2F"
    assert SocialAccount.objects.exists()
    client.post("/account/confirm", {"password": PASSWORD})
    client.post("/account/social/", {"account": account.pk})
    assert not SocialAccount.objects.exists()
    assert [entry.after for entry in entries("user.account_disconnected")] == [{"provider": "sso", "uid": "thief"}]


@pytest.fixture
def provided(client: Client, user: User, identity_provider: IdentityProvider) -> User:
    """A user without a password, whose session is old."""
    user.set_unusable_password()
    user.save()
    sign_in(client, identity_provider)
    assert is_signed_in(client)
    make_old(client)
    return user


def test_a_user_without_a_password_reauthenticates_at_the_provider(client, provided, identity_provider):
    for path in ("/account/password/set", "/account/mfa/totp/activate/"):
        assert client.get(path).url.startswith(CONFIRM), path
    page = client.get(f"{CONFIRM}/account/password/set").content.decode()
    assert "Sign in again at your identity provider." in page
    assert 'name="password"' not in page
    assert 'action="/account/oidc/sso/login/?auth_params=prompt%3Dlogin"' in page
    session = client.session.session_key
    response = sign_in(client, identity_provider, process="reauthenticate", next="/account/password/set")
    assert response.url == "/account/password/set"
    assert client.session.session_key == session
    new = "another horse battery staple"
    client.post("/account/password/set", {"password1": new, "password2": new})
    provided.refresh_from_db()
    assert provided.check_password(new)


def test_an_old_session_at_the_provider_does_not_reauthenticate(client, provided, identity_provider):
    identity_provider.claims["auth_time"] = int(time.time()) - settings.ACCOUNT_REAUTHENTICATION_TIMEOUT - 1
    assert sign_in(client, identity_provider, process="reauthenticate", next="/account/password/set").url == "/account/"
    assert client.get("/account/password/set").url.startswith(CONFIRM)
    identity_provider.claims["auth_time"] = int(time.time())
    response = sign_in(client, identity_provider, process="reauthenticate", next="/account/password/set")
    assert response.url == "/account/password/set"
    assert client.get("/account/password/set").status_code == 200


def test_a_form_is_submitted_after_the_round_trip(client, provided, identity_provider):
    sent = {"email": "new@example.com", "role": "admin"}
    response = client.post("/t/acme/members/invite", sent)
    assert response.url.startswith(CONFIRM)
    response = sign_in(client, identity_provider, process="reauthenticate", next="/t/acme/members/invite")
    assert response.url == "/t/acme/members/invite"
    client.get(response.url)
    assert [invitation.email for invitation in unscoped(Invitation).filter(email="new@example.com")]


def test_another_identity_does_not_reauthenticate(client, provided, identity_provider):
    """Also one whose verified address is the user's, because it is not connected."""
    for sub, email in (("u-2", "other@example.com"), ("u-3", EMAIL)):
        identity_provider.claims |= {"sub": sub, "email": email}
        assert (
            sign_in(client, identity_provider, process="reauthenticate", next="/account/password/set").url
            == "/account/"
        )
        assert client.get("/account/password/set").url.startswith(CONFIRM)
    assert SocialAccount.objects.count() == 1
    visitor = Client()
    assert sign_in(visitor, identity_provider, process="reauthenticate").url == "/account/"
    assert not is_signed_in(visitor)


def test_a_user_without_any_method_gets_a_link_for_a_password(client, user, identity_provider):
    user.set_unusable_password()
    user.save()
    client.force_login(user)
    response = client.get("/account/mfa/totp/activate/", follow=True)
    assert "you have none" in response.content.decode()
    assert 'href="/account/password/reset"' in response.content.decode()
    assert client.post("/account/confirm", {"password": ""}).status_code == 200
    assert EmailAddress.objects.get(user=user).verified
