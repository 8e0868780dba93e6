"""Quotes: the cost of usage at the prices of a file, computed as for a request. Does not import Django."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import astuple

from billing.rates.price_book import ModelTier, Proposal, check
from billing.rates.pricing import COMPONENTS, METERED, NO_END, Component, PriceIndex, Rate, RateCard, Tier, price
from inference_worker.contract.request import TokenCounts

Tokens = Annotated[int, msgspec.Meta(ge=0, lt=NO_END)]


class QuotedUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens of a request by component, its model and its tier."""

    model: str
    tokens: dict[Component, Tokens]
    tier: Tier = Tier.STANDARD


class QuoteLine(NamedTuple):
    """The cost of a component. Tokens times the price is the cost, exactly."""

    component: Component
    tokens: int
    nano_per_million: int
    cost_femto: int


class Quote(NamedTuple):
    """The cost of a request. Its tier is `standard` if the requested one has no prices."""

    tier: Tier
    lines: list[QuoteLine]
    cost_femto: int


def read_usage(content: bytes) -> QuotedUsage:
    """Read usage from JSON.

    Raises: ValueError with the reason if it is invalid.
    """
    return msgspec.json.decode(content, type=QuotedUsage)


def quote(prices: Proposal, usage: QuotedUsage, at: int) -> Quote:
    """Return the cost of usage admitted at that microsecond since 1970, UTC.

    Raises:
        ValueError: the prices are invalid, or the model has none.
        UnknownPriceError: a component used has no price.
    """
    check(prices)
    index = PriceIndex()
    index.add(_rate_cards(prices, at))
    rate_card = index.find(0, usage.model, usage.tier, at)
    if rate_card is None:
        raise ValueError(f"no price for the model {usage.model!r} in the tier {usage.tier} or standard")
    if metered := usage.tokens.keys() & set(METERED):
        raise ValueError(f"{min(metered)} is not part of a request")
    counts = TokenCounts(**usage.tokens)
    rated = price(rate_card, counts, at)
    rates = {rate.price_id: rate for rate in rate_card.rates}
    lines = [
        QuoteLine(component, tokens, rates[price_id].nano_per_million, tokens * rates[price_id].nano_per_million)
        for component, tokens, price_id in zip(COMPONENTS, astuple(counts), rated.price_ids or (), strict=True)
        if price_id is not None
    ]
    return Quote(rate_card.tier, lines, rated.cost_femto)


def _rate_cards(prices: Proposal, at: int) -> list[RateCard]:
    """Return a rate card of each model and tier, active from that microsecond on."""
    by_model_tier: dict[ModelTier, list[Rate]] = {}
    for number, row in enumerate(prices.prices):
        rates = by_model_tier.setdefault(row.model_tier, [])
        rates.append(Rate(number, row.component, row.nano_per_million, *row.ranges))
    return [
        RateCard(version, None, model, tier, at, tuple(rates))
        for version, ((model, tier), rates) in enumerate(by_model_tier.items(), 1)
    ]
