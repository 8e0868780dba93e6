"""Charges for an upstream's usage: exact up to the reservation, and never above it."""

from __future__ import annotations

from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from billing.rates.pricing import COMPONENTS, Component, Rate, RateCard, Tier, UnknownPriceError, price
from billing.rates.reserved_charge import charge
from inference_worker.contract.request import TokenCounts

PRICES = st.integers(0, 5 * 10**9)
COUNTS = st.builds(TokenCounts, *[st.integers(0, 10_000)] * 5)


def card(**nano: int) -> RateCard:
    return RateCard(
        1, None, "m", Tier.STANDARD, 0, tuple(Rate(i, Component(n), p) for i, (n, p) in enumerate(nano.items()))
    )


@given(
    COUNTS,
    st.tuples(*[PRICES] * 5),
    st.none() | st.integers(0, 10**14),
    st.none() | st.integers(0, 60_000),
)
def test_a_charge_is_the_most_that_fits_the_reservation(
    counts: TokenCounts, nano: tuple[int, ...], max_femto: int | None, max_tokens: int | None
) -> None:
    rate_card = card(**dict(zip(COMPONENTS, nano, strict=False)))
    full = price(rate_card, counts, 0)
    found = charge(rate_card, counts, 0, max_femto=max_femto, max_tokens=max_tokens)
    assert found.rated.cost_femto == sum(map(mul, astuple(found.counts), nano))
    assert found.rated.cost_femto + found.unbilled_femto == full.cost_femto
    assert counts.total - found.counts.total == found.unbilled_tokens >= 0
    assert max_femto is None or found.rated.cost_femto <= max_femto
    assert max_tokens is None or found.counts.total <= max_tokens
    for price_of_one, reported, charged in zip(nano, astuple(counts), astuple(found.counts), strict=False):
        assert 0 <= charged <= reported
        fits_money = max_femto is None or found.rated.cost_femto + price_of_one <= max_femto
        fits_tokens = max_tokens is None or found.counts.total < max_tokens
        assert charged == reported or not (fits_money and fits_tokens)
    if max_femto is None and max_tokens is None:
        assert (found.counts, found.rated) == (counts, full)


def test_prices_are_those_of_the_reported_prompt() -> None:
    long = Rate(2, Component.UNCACHED, 2000, 101)
    rate_card = RateCard(1, None, "m", Tier.STANDARD, 0, (Rate(1, Component.UNCACHED, 1000, 0, 101), long))
    found = charge(rate_card, TokenCounts(150), 0, max_femto=100_000, max_tokens=None)
    assert (found.counts.uncached, found.rated.price_ids[0], found.rated.cost_femto) == (50, 2, 100_000)  # type: ignore[index]


def test_prompt_tokens_without_a_price_are_uncached() -> None:
    found = charge(card(uncached=10, output=20), TokenCounts(1, 2, 3, 4, 5), 0, max_femto=None, max_tokens=None)
    assert (found.counts, found.rated.cost_femto) == (TokenCounts(10, output=5), 200)
    with pytest.raises(UnknownPriceError):
        charge(card(uncached=10), TokenCounts(1, output=5), 0, max_femto=None, max_tokens=None)


def test_without_prices_only_tokens_are_limited() -> None:
    found = charge(None, TokenCounts(5, output=5), 0, max_femto=0, max_tokens=7)
    assert (found.counts, found.rated, found.unbilled_tokens) == (TokenCounts(5, output=2), (None, 0, 0), 3)


def test_searches_do_not_count_toward_the_reserved_tokens() -> None:
    found = charge(card(uncached=10, searches=7), TokenCounts(5, searches=3), 0, max_femto=None, max_tokens=5)
    assert (found.counts.uncached, found.counts.searches, found.rated.cost_femto) == (5, 3, 71)
    found = charge(card(uncached=10, searches=7), TokenCounts(5, searches=3), 0, max_femto=64, max_tokens=5)
    assert (found.counts.uncached, found.counts.searches, found.unbilled_femto) == (5, 2, 7)
