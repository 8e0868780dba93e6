"""Passkeys in a browser with a virtual authenticator: added, used as a second factor and without password, removed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from playwright.sync_api import Page, expect

from tenants import actions
from tenants.models import User
from tests.support.frontend.console import PASSWORD
from tests.support.frontend.pages import AXE, accessible


def add_authenticator(page: Page, **options: Any) -> Any:
    """Add a device to the browser of the page, and return its session of the DevTools protocol and its ID."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("WebAuthn.enable")
    given = {
        **{"protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True},
        **{"isUserVerified": True, "automaticPresenceSimulation": True},
    } | options
    return devtools, devtools.send("WebAuthn.addVirtualAuthenticator", {"options": given})["authenticatorId"]


@pytest.mark.django_db(transaction=True)
def test_a_passkey_is_added_used_and_removed(live_server, window, settings):
    base = live_server.url.replace("127.0.0.1", "localhost")
    settings.MILLRACE = replace(settings.MILLRACE, public_url=base)
    settings.ALLOWED_HOSTS = ["localhost"]
    user = User.objects.create_user("dev@example.com", PASSWORD)
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), user, "admin")
    page = window(base_url=base).new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.add_init_script(path=AXE)
    devtools, device = add_authenticator(page)

    def enter_password() -> None:
        page.goto("/login")
        page.get_by_label("Email address").fill("dev@example.com")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in", exact=True).click()

    def sign_out() -> None:
        page.context.clear_cookies()

    enter_password()
    page.wait_for_url("**/t/acme/")
    page.goto("/account/")
    settings.ACCOUNT_REAUTHENTICATION_TIMEOUT = 0  # every sign-in is old
    page.get_by_role("link", name="Add passkey").click()
    page.get_by_label("Password").fill(PASSWORD)
    settings.ACCOUNT_REAUTHENTICATION_TIMEOUT = 300
    page.get_by_role("button", name="Confirm").click()
    expect(page.get_by_role("heading", name="Add passkey")).to_be_visible()
    accessible(page)
    page.get_by_label("Name").fill("Laptop")
    page.get_by_role("button", name="Add passkey").click()
    expect(page.get_by_role("heading", name="Recovery codes")).to_be_visible()
    (stored,) = devtools.send("WebAuthn.getCredentials", {"authenticatorId": device})["credentials"]
    assert (stored["isResidentCredential"], stored["rpId"]) == (True, "localhost")

    sign_out()
    enter_password()
    expect(page.get_by_role("heading", name="Two-factor authentication")).to_be_visible()
    accessible(page)
    page.get_by_role("button", name="Use passkey").click()
    page.wait_for_url("**/t/acme/")

    sign_out()
    page.goto("/login?next=/t/acme/usage/")
    accessible(page)
    page.get_by_role("button", name="Sign in with a passkey").click()
    page.wait_for_url(f"{base}/t/acme/usage/")  # a pattern would match the address of the sign-in page, too
    assert Authenticator.objects.get(user=user, type="webauthn").data["sign_count"] >= 2

    page.goto("/account/mfa/webauthn/")
    expect(page.get_by_role("heading", name="Laptop")).to_be_visible()
    accessible(page)
    settings.ACCOUNT_REAUTHENTICATION_TIMEOUT = 0
    page.get_by_role("link", name="Remove Laptop").click()
    page.wait_for_url("**/reauthenticate/**")
    settings.ACCOUNT_REAUTHENTICATION_TIMEOUT = 300
    page.get_by_role("button", name="Use passkey").click()
    page.get_by_role("button", name="Remove passkey").click()
    expect(page.get_by_text("You have no passkeys.")).to_be_visible()
    assert not Authenticator.objects.filter(user=user).exists()

    sign_out()
    page.goto("/login")
    page.get_by_role("button", name="Sign in with a passkey").click()
    expect(page.get_by_role("alert")).to_be_visible()  # the server has no such passkey any more
    page.goto("/t/acme/")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert complaints == []


@pytest.mark.django_db(transaction=True)
def test_a_refused_passkey_shows_an_error(live_server, window, settings):
    base = live_server.url.replace("127.0.0.1", "localhost")
    settings.MILLRACE = replace(settings.MILLRACE, public_url=base)
    settings.ALLOWED_HOSTS = ["localhost"]
    page = window(base_url=base).new_page()
    add_authenticator(page)  # without a passkey of this server
    page.goto("/login")
    page.get_by_role("button", name="Sign in with a passkey").click()
    expect(page.get_by_role("alert")).to_have_text("No passkey was used. Try again.")
    expect(page.get_by_role("button", name="Sign in with a passkey")).to_be_enabled()
