"""Default prices of the embedded models, so that a new platform can price requests."""

from __future__ import annotations

from collections.abc import Iterable

from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier

C = Component
GENERATION = {
    C.UNCACHED: "3",
    C.CACHE_READ: "0.30",
    C.CACHE_WRITE_5M: "3.75",
    C.CACHE_WRITE_1H: "6",
    C.OUTPUT: "15",
    C.ANSWER_HIT_INPUT: "0.30",
    C.ANSWER_HIT_OUTPUT: "1.50",
}
BATCH = {
    C.UNCACHED: "1.50",
    C.CACHE_READ: "0.15",
    C.CACHE_WRITE_5M: "1.875",
    C.CACHE_WRITE_1H: "3",
    C.OUTPUT: "7.50",
}
EMBEDDING = {C.UNCACHED: "0.02", C.CACHE_READ: "0.02"}


def proposal(models: Iterable[str], embeddings: Iterable[str] = ()) -> Proposal:
    """Return the prices in USD per million tokens of the generation and embedding models."""
    prices = [
        NewPrice(model, tier, component, nano_per_million(usd))
        for names, tiers in (
            (models, {Tier.STANDARD: GENERATION, Tier.BATCH: BATCH}),
            (embeddings, {Tier.STANDARD: EMBEDDING, Tier.BATCH: EMBEDDING}),
        )
        for model in names
        for tier, list_ in tiers.items()
        for component, usd in list_.items()
    ]
    return Proposal(tuple(prices))
