"""The email address of a user is stored as verified: users join by links that were emailed to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from allauth.account.models import EmailAddress
from django.core.cache import cache
from django.core.management import call_command
from django.test import Client

from millrace.demo import seeding
from millrace.demo.tenants import CAST
from tenants import actions, invitations
from tenants.management.commands.bootstrap import OWNER_EMAIL, bootstrap
from tenants.models import User
from tests.support.frontend.console import PASSWORD, remembered

pytestmark = pytest.mark.django_db
EMAIL = "dev@example.com"


@pytest.fixture(autouse=True)
def _on_localhost(settings: Any) -> None:
    """Use a public URL that allows passkeys, and forget throttled attempts."""
    cache.clear()
    settings.MILLRACE = replace(settings.MILLRACE, public_url="http://localhost:8000")


def by_create_user(_: Path) -> User:
    return User.objects.create_user("Dev@Example.com", PASSWORD)


def by_createsuperuser(_: Path) -> User:
    call_command("createsuperuser", email=EMAIL, interactive=False)
    return User.objects.get(email=EMAIL)


def by_save(_: Path) -> User:
    user = User(email=EMAIL)
    user.save()
    return user


def by_bootstrap(directory: Path) -> User:
    bootstrap(directory, with_demo=True)
    return User.objects.get(email=OWNER_EMAIL)


def by_demo_data(_: Path) -> User:
    spec = CAST[0]
    tenant = actions.do_create_tenant(spec.slug, spec.name, is_demo=True)
    return seeding._person(seeding.DemoTenant(spec, tenant), next(iter(spec.people)), PASSWORD)


def by_invitation(_: Path) -> User:
    invitation = actions.do_invite(actions.do_create_tenant("acme", "Acme"), EMAIL, "admin")
    response = Client().post(f"/invitations/{invitations.token(invitation)}", {"name": "Dev", "password": PASSWORD})
    assert response.status_code == 302
    return User.objects.get(email=EMAIL)


def by_a_change_of_the_address(_: Path) -> User:
    user = User.objects.create_user("old@example.com", PASSWORD)
    user.email = EMAIL
    user.save(update_fields=["email"])
    return user


ORIGINS = (
    *(by_create_user, by_createsuperuser, by_save, by_bootstrap, by_demo_data, by_invitation),
    by_a_change_of_the_address,
)


def addresses_of(user: User) -> list[tuple[str, bool, bool]]:
    return list(EmailAddress.objects.filter(user=user).values_list("email", "verified", "primary"))


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_requested_password_reset_leaves_the_second_factor_available(
    origin: Callable[[Path], User], tmp_path: Path
) -> None:
    user = origin(tmp_path)
    assert addresses_of(user) == [(user.email, True, True)]
    assert Client().post("/account/password/reset", {"email": user.email}).status_code == 302
    assert addresses_of(user) == [(user.email, True, True)]
    client = Client()
    client.force_login(user)
    remembered(client.session)
    for path in ("/account/mfa/totp/activate/", "/account/mfa/webauthn/add/"):
        assert client.get(path).status_code == 200, path


def test_an_address_belongs_to_one_user() -> None:
    first, second = (User.objects.create_user(f"{name}@example.com") for name in ("first", "second"))
    first.email = "third@example.com"
    first.save()
    second.email = "first@example.com"
    second.save()
    assert addresses_of(first) == [("third@example.com", True, True)]
    assert addresses_of(second) == [("first@example.com", True, True)]
