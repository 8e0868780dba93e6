"""A price list from the draft to the tenant's page, in a browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tenants.models import User
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.frontend.price_lists import newest, page_of


@pytest.fixture
def operator(db, client) -> User:
    user = User.objects.create_superuser("op@example.com", PASSWORD)
    client.force_login(user)
    remembered(client.session)
    return user


@pytest.fixture
def second(db) -> User:
    return User.objects.create_superuser("second@example.com", PASSWORD)


def test_a_price_list_from_the_draft_to_a_read_only_view_of_the_tenant(window, served, table, operator, second, acme):
    """One operator drafts and another publishes, then reads the prices in a read-only view of the tenant's console."""
    first = page_of(window(base_url=served), served, operator)
    first.goto("/operator/prices/model")
    first.get_by_label("Model", exact=True).fill("new-model")
    first.get_by_label("Output", exact=True).fill("0.123456789")
    first.get_by_role("button", name="Draft").click()
    expect(first.get_by_text("You created this draft.")).to_be_visible()
    expect(first.get_by_role("link", name="Publish")).to_have_count(0)

    other = page_of(window(base_url=served), served, second)
    other.goto(first.url)
    other.get_by_role("link", name="Publish").click()
    other.get_by_label("to confirm").fill(str(newest().pk))
    other.get_by_role("button", name="Publish").click()
    expect(other.get_by_text("was published.")).to_be_visible()

    other.goto("/t/acme/prices/")
    other.get_by_label("Reason").fill("ticket 12")
    other.get_by_role("button", name="View").click()
    expect(other.get_by_role("row", name="new-model")).to_contain_text("$0.123456789")
    expect(other.get_by_text("You are viewing Acme as an operator.")).to_be_visible()
    token = other.locator("[name=csrfmiddlewaretoken]").first.input_value()
    response = other.request.post("/t/acme/keys/new", form={"name": "x", "csrfmiddlewaretoken": token})
    assert response.status == 403
    other.get_by_role("button", name="End view").click()
    expect(other.get_by_role("heading", name="Acme", exact=True)).to_be_visible()
    expect(other.get_by_role("button", name="End view")).to_have_count(0)
