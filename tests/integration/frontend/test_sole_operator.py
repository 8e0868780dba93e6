"""The console of a platform with one operator: publication with the password, and its cancellation."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from billing.models import PriceVersion
from billing.pricing.prices import do_propose_prices
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from tenants.models import User
from tests.support.frontend.console import PASSWORD
from tests.support.frontend.price_lists import log_in, newest
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
BUTTON = "Publish without a second operator"


@pytest.fixture
def sole(db) -> User:
    return User.objects.create_superuser("op@example.com", PASSWORD)


@pytest.fixture
def signed_in(sole) -> Client:
    return log_in(sole)


@pytest.fixture
def version(sole) -> PriceVersion:
    return do_propose_prices(Proposal((NewPrice("m", Tier.STANDARD, Component.OUTPUT, 10**9),)), created_by=sole)


def url_of(version: PriceVersion, name: str = "") -> str:
    return f"/operator/prices/{version.pk}/{name}"


def read(client: Client, url: str, **headers: Any) -> str:
    return client.get(url, headers=headers).content.decode()


def test_the_only_operator_publishes_and_cancels(signed_in, version, sole):
    page = read(signed_in, url_of(version))
    assert BUTTON in page
    assert "No second operator needed" in page
    form = read(signed_in, url_of(version, "publish-as-sole-operator"))
    assert 'type="password"' in form
    url = url_of(version, "publish-as-sole-operator")
    for typed, error in (({}, "This field is required."), ({"password": "wrong"}, "This is not your password.")):
        refused = signed_in.post(url, typed)
        assert (refused.status_code, error in refused.content.decode()) == (422, True)
        assert newest().state == "draft"
    assert signed_in.post(url, {"password": PASSWORD}).status_code == 303
    assert newest().state == "scheduled"
    page = read(signed_in, url_of(version))
    assert "These prices have not taken effect." in page
    assert BUTTON not in page
    assert "Scheduled" in read(signed_in, "/operator/prices/")
    assert signed_in.post(url, {"password": PASSWORD}).status_code == 422
    assert "never take effect" in read(signed_in, url_of(version, "cancel"))
    assert signed_in.post(url_of(version, "cancel")).status_code == 303
    page = read(signed_in, url_of(version))
    assert "Cancelled by operator" in page
    assert url_of(version, "cancel") not in page
    assert signed_in.post(url_of(version, "cancel")).status_code == 422


def test_a_second_operator_cancels(signed_in, version, sole):
    signed_in.post(url_of(version, "publish-as-sole-operator"), {"password": PASSWORD})
    second = log_in(User.objects.create_superuser("second@example.com", PASSWORD))
    assert url_of(version, "cancel") in read(second, url_of(version))
    assert second.post(url_of(version, "cancel")).status_code == 303
    assert unscoped(PriceVersion).get(pk=version.pk).cancelled_by_id != sole.pk


def test_with_two_operators_the_page_says_who_publishes(signed_in, version):
    second = User.objects.create_superuser("second@example.com", PASSWORD)
    for _ in range(2):
        page = read(signed_in, url_of(version))
        assert url_of(version, "publish-as-sole-operator") not in page
        assert "Another operator must review and publish these prices." in page
        refused = signed_in.post(url_of(version, "publish-as-sole-operator"), {"password": PASSWORD})
        assert refused.status_code == 422
        User.objects.filter(pk=second.pk).update(is_active=False)
    assert "One was deactivated or lost the right on" in page
    assert newest().state == "draft"


def test_a_password_is_never_stored_with_a_suspended_form(sole, version):
    client = Client()
    client.force_login(sole)  # some time ago
    response = client.post(url_of(version, "publish-as-sole-operator"), {"password": PASSWORD, "other": "kept"})
    assert response.url.startswith("/account/confirm?")
    stored = client.session["account_reauthentication_state"]["state"]["form"]
    assert stored == "other=kept"
    confirmed = client.post(response.url, {"password": PASSWORD})
    shown = client.get(confirmed.url)
    assert (shown.status_code, "This field is required." in shown.content.decode()) == (422, True)
    assert client.post(url_of(version, "publish-as-sole-operator"), {"password": PASSWORD}).status_code == 303
