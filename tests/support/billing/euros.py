"""Tenants that are billed in other currencies."""

from __future__ import annotations

from billing.pricing.prices import do_assign_book, do_propose_prices, do_publish_prices
from billing.rates.price_files import read_csv
from tenants.models import Tenant

CSV = ["model,tier,component,usd_per_million", "alpha,,uncached,10"]


def bill_in_euros(tenant: Tenant, currency: str = "EUR") -> None:
    """Assign a tenant to a price book in EUR, or another currency, which is created."""
    book = currency.lower()
    do_publish_prices(do_propose_prices(read_csv(CSV), book=book, currency=currency), by=None)
    do_assign_book(tenant, book)
