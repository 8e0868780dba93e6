"""Screen of the tenant's prices, with bands, a tier, and an announced change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.pricing.prices import do_propose_prices, do_publish_prices  # here: Django is not set up on import
    from billing.rates.price_book import NewPrice, Proposal, nano_per_million
    from billing.rates.pricing import Component, Tier

    def publish(model: str, price: str, since: datetime | None) -> None:
        ends = ((0, 200_001), (200_001, 2**31 - 1))
        rows = [
            NewPrice(model, Tier.STANDARD, Component.UNCACHED, nano_per_million(price) * (1 + place), *band)
            for place, band in enumerate(ends)
        ]
        rows += [
            NewPrice(model, Tier.STANDARD, each, nano_per_million(price))
            for each in (Component.OUTPUT, Component.CACHE_READ)
        ]
        rows.append(NewPrice(model, Tier.BATCH, Component.UNCACHED, nano_per_million(price) // 2))
        rows.append(NewPrice(model, Tier.BATCH, Component.OUTPUT, nano_per_million(price) // 2))
        version = do_propose_prices(Proposal(tuple(rows)), effective_from=since)
        do_publish_prices(version, by=None)

    publish("long-reader", "1.25", None)
    publish("long-reader", "1", datetime.now(UTC) + timedelta(days=30))


register(Screen("prices", "/t/{slug}/prices/", queries=16), prepare=prepare)
