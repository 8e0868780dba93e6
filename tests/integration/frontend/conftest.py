from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.frontend.identity_provider import IdentityProvider

ALLAUTHS = "allauth.socialaccount.providers.openid_connect.provider.OpenIDConnectProvider"


@pytest.fixture(autouse=True)
def _strict_templates(strict_templates: None) -> None:
    pass


@pytest.fixture
def identity_provider(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[IdentityProvider]:
    """A provider that the platform is configured for."""
    from allauth.socialaccount.providers import registry
    from django.core.cache import cache
    from django.utils.module_loading import import_string

    from tests.support.frontend.identity_provider import CLIENT_ID, running

    cache.clear()  # throttled attempts
    configured = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]
    provider_class = import_string(configured.get("provider_class", ALLAUTHS))
    monkeypatch.setitem(registry.provider_map, "openid_connect", provider_class)
    with running() as provider:
        app = {"provider_id": "sso", "name": "SSO", "client_id": CLIENT_ID, "secret": "s"}
        app["settings"] = {"server_url": provider.issuer}
        settings.SOCIALACCOUNT_PROVIDERS = {"openid_connect": configured | {"APPS": [app]}}
        settings.MILLRACE = dataclasses.replace(settings.MILLRACE, oidc_issuer=provider.issuer)
        yield provider


@pytest.fixture(autouse=True)
def _password_resets_without_a_web_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenants.outbox import user_emails  # here: imported before Django is set up

    monkeypatch.setattr(user_emails, "queue_password_reset_email", user_emails.send_password_reset_email)
