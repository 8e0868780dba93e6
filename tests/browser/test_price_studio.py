"""The price studio and the publication without a second operator, in a browser."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from playwright.sync_api import expect

from billing.costs.cost_cards import do_import_costs
from billing.invoicing.price_projection import month_before
from billing.models import CompiledRateCard
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier
from tenants.models import User
from tests.support.frontend.console import PASSWORD
from tests.support.frontend.price_lists import newest, page_of
from tests.support.rows import unscoped

LAST_MONTH = datetime.strptime(month_before(datetime.now(UTC)), "%Y-%m").replace(tzinfo=UTC)
C = Component


@pytest.fixture
def operator(table: None) -> User:
    return User.objects.create_superuser("op@example.com", PASSWORD)


def price(usd: str, component: Component = C.OUTPUT, tier: Tier = Tier.STANDARD, **fields: Any) -> NewPrice:
    return NewPrice("m", tier, component, nano_per_million(usd), **fields)


def test_prices_from_the_studio_to_their_cancellation(window, served, operator, acme, use):
    """What is typed stays while changes and margins follow it, and the draft shows the month that was computed."""
    listed = (price("10"), price("2", C.UNCACHED), price("0.2", C.CACHE_READ), price("5", tier=Tier.BATCH))
    do_publish_prices(do_propose_prices(Proposal(listed), effective_from=LAST_MONTH), by=None)
    do_import_costs({"m": [price("4"), price("1", C.UNCACHED)]})
    card = next(row for row in unscoped(CompiledRateCard).all() if row.tier == Tier.STANDARD)
    use(acme, model="m", output=10_000_000, at=LAST_MONTH.replace(day=9), price_version=card.pk)

    page = page_of(window(base_url=served), served, operator)
    page.goto("/operator/prices/")
    page.get_by_role("link", name="Price studio").click()
    page.get_by_label("Model", exact=True).fill("m")
    page.get_by_role("button", name="Show", exact=True).click()
    output = page.get_by_label("Standard, Output", exact=True)
    expect(output).to_have_value("10.00")
    output.fill("12.5")
    row = page.get_by_role("row").filter(has=output)
    expect(row).to_contain_text("+25.0%")
    expect(row).to_contain_text("68.0%")
    page.get_by_label("Note", exact=True).fill("dearer output")
    page.get_by_role("button", name="Compute").click()
    expect(page.get_by_text("at these prices: +$25.00 (+25.0%)")).to_be_visible()
    expect(page.get_by_text("Acme +$25.00")).to_be_visible()
    expect(output).to_have_value("12.5")
    expect(page.get_by_label("Note", exact=True)).to_have_value("dearer output")
    page.get_by_role("button", name="Create draft").click()

    expect(page.get_by_text("you are the sole operator")).to_be_visible()
    expect(page.get_by_text("at these prices: +$25.00 (+25.0%)")).to_be_visible()
    page.get_by_role("link", name="Publish without a second operator").click()
    password = page.get_by_label("Password")
    password.fill("wrong")
    page.get_by_role("dialog").get_by_role("button", name="Publish").click()
    expect(page.get_by_text("This is not your password.")).to_be_visible()
    password.fill(PASSWORD)
    page.get_by_role("dialog").get_by_role("button", name="Publish").click()
    expect(page.get_by_text("These prices have not taken effect.")).to_be_visible()
    assert newest().state == "scheduled"
    page.get_by_role("link", name="Cancel prices").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel prices").click()
    expect(page.get_by_text("was cancelled.")).to_be_visible()
    assert newest().state == "cancelled"
