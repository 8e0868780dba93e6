"""A tenant that is billed in EUR."""

from __future__ import annotations

from billing.actions.prices import do_assign_book, do_propose_prices, do_publish_prices
from billing.pricing.price_files import read_csv
from tenants.models import Tenant

CSV = ["model,tier,component,usd_per_million", "alpha,,uncached,10"]


def bill_in_euros(tenant: Tenant) -> None:
    """Assign a tenant to a price book in EUR, which is created."""
    do_publish_prices(do_propose_prices(read_csv(CSV), book="eur", currency="EUR"), by=None)
    do_assign_book(tenant, "eur")
