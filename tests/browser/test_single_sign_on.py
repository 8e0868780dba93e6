"""Sign-in and re-authentication at an identity provider in a browser, which checks the redirects of a form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from html import escape
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from allauth.socialaccount.providers import registry
from django.core.cache import cache
from django.utils.module_loading import import_string
from playwright.sync_api import BrowserContext, expect

from tenants import actions
from tenants.models import User
from tests.support.frontend import identity_provider
from tests.support.frontend.pages import AXE, accessible

pytestmark = pytest.mark.django_db(transaction=True)
ALLAUTHS = "allauth.socialaccount.providers.openid_connect.provider.OpenIDConnectProvider"


def test_a_user_without_a_password_signs_in_and_reauthenticates_at_the_provider(
    window: Callable[..., BrowserContext], served: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.clear()
    user = User.objects.create_user("dev@example.com")
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), user, "owner")
    configured = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]
    provider_class = import_string(configured.get("provider_class", ALLAUTHS))
    monkeypatch.setitem(registry.provider_map, "openid_connect", provider_class)
    prompts: list[str | None] = []

    class WithPage(identity_provider._Handler):
        """A provider with a page that leads back to the platform after the user has signed in."""

        def do_GET(self) -> None:  # noqa: N802  (the name is that of the base class)
            if not self.path.startswith("/authorization_endpoint?"):
                super().do_GET()
                return
            sent = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
            prompts.append(sent.get("prompt"))
            self.provider.nonce = sent.get("nonce")
            url = f"{sent['redirect_uri']}?{urlencode({'state': sent['state'], 'code': 'c'})}"
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f'<a href="{escape(url)}">Continue</a>'.encode())

    monkeypatch.setattr(identity_provider, "_Handler", WithPage)
    with identity_provider.running() as provider:
        app = {"provider_id": "sso", "name": "SSO", "client_id": identity_provider.CLIENT_ID, "secret": "s"}
        app["settings"] = {"server_url": provider.issuer}
        settings.SOCIALACCOUNT_PROVIDERS = {"openid_connect": configured | {"APPS": [app]}}
        settings.MILLRACE = dataclasses.replace(settings.MILLRACE, oidc_issuer=provider.issuer, public_url=served)
        page = window(base_url=served).new_page()
        page.add_init_script(path=AXE)
        page.goto("/login")
        page.get_by_role("button", name="Single sign-on").click()
        page.get_by_role("link", name="Continue").click()
        page.wait_for_url("**/t/acme/")
        settings.ACCOUNT_REAUTHENTICATION_TIMEOUT = 0  # every sign-in is old
        page.goto("/account/password/set")
        expect(page.get_by_role("heading", name="Confirm it’s you")).to_be_visible()
        accessible(page)
        settings.ACCOUNT_REAUTHENTICATION_TIMEOUT = 300
        page.get_by_role("button", name="Single sign-on").click()
        page.get_by_role("link", name="Continue").click()
        expect(page.get_by_role("heading", name="Set password")).to_be_visible()
        assert prompts == [None, "login"]
