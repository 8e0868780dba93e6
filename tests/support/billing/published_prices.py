"""Published price lists for tests."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal

from billing.models import CompiledRateCard
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier
from tests.support.rows import unscoped

A = {"uncached": "3", "cache_write_5m": "3.75", "cache_write_1h": "6", "cache_read": "0.30", "output": "15"}


def publish(usd: dict[str, str], tier: Tier = Tier.STANDARD, at: datetime | None = None) -> int:
    """Publish prices and return the version that an admission pins then."""
    prices = [NewPrice("m", tier, Component(name), nano_per_million(each)) for name, each in usd.items()]
    do_publish_prices(do_propose_prices(Proposal(tuple(prices)), effective_from=at), by=None)
    return unscoped(CompiledRateCard).filter(tier=tier)[-1].pk


def usd(femto: Decimal | int) -> Decimal:
    return Decimal(femto).scaleb(-15).normalize()
