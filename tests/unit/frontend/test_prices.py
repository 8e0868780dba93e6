"""The table of prices: each row has the prices of all components for a band and a time of day."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from billing.rates.price_book import NewPrice
from billing.rates.pricing import MINUTES_A_DAY, NO_END, Component, Tier
from frontend.tenant.prices.page import models_of

COLUMNS = [(Component.UNCACHED, "Input"), (Component.CACHE_READ, "Cache read"), (Component.OUTPUT, "Output")]
LONG, NIGHT = 200_001, 1200


def price(component: Component, nano: int, *place: int) -> NewPrice:
    return NewPrice("m", Tier.STANDARD, component, nano * 10**9, *place)


def table(*prices: NewPrice) -> dict[str, list[str]]:
    (model,) = models_of(prices, COLUMNS)
    assert len({row.when for row in model.rows}) == len(model.rows)
    return {row.when: [cell.price.exact if cell.price else "–" for cell in row.cells] for row in model.rows}


def test_a_component_without_bands_is_in_each_bands_row():
    assert table(
        price(Component.UNCACHED, 1, 0, LONG),
        price(Component.UNCACHED, 2, LONG, NO_END),
        price(Component.OUTPUT, 9),
    ) == {
        "prompts up to 200,000 tokens": ["1.00", "–", "9.00"],
        "prompts of 200,001 tokens or more": ["2.00", "–", "9.00"],
    }


def test_a_time_of_day_splits_only_its_own_band():
    short = (0, LONG)
    assert table(
        price(Component.UNCACHED, 2, *short, 0, NIGHT),
        price(Component.UNCACHED, 1, *short, NIGHT, MINUTES_A_DAY),
        price(Component.UNCACHED, 3, LONG, NO_END),
        price(Component.OUTPUT, 9),
    ) == {
        "prompts up to 200,000 tokens, 00:00 to 20:00 UTC": ["2.00", "–", "9.00"],
        "prompts up to 200,000 tokens, 20:00 to 24:00 UTC": ["1.00", "–", "9.00"],
        "prompts of 200,001 tokens or more": ["3.00", "–", "9.00"],
    }


def test_a_missing_price_is_shown_and_a_band_without_prices_is_left_out():
    assert table(price(Component.UNCACHED, 1, 0, 100), price(Component.OUTPUT, 9, 0, 50)) == {
        "prompts up to 49 tokens": ["1.00", "–", "9.00"],
        "prompts of 50 to 99 tokens": ["1.00", "–", "–"],
    }
    assert list(table(price(Component.OUTPUT, 9, 0, 10), price(Component.OUTPUT, 9, 20, 30))) == [
        "prompts up to 9 tokens",
        "prompts of 20 to 29 tokens",
    ]


@given(cuts=st.lists(st.sets(st.integers(1, 50), max_size=3), min_size=3, max_size=3))
def test_every_row_has_the_price_of_every_component(cuts):
    found = []
    for (component, _), mine in zip(COLUMNS, cuts, strict=True):
        ends = [0, *sorted(mine), NO_END]
        found += [price(component, 1 + ends[i], ends[i], ends[i + 1]) for i in range(len(ends) - 1)]
    rows = table(*found)
    assert len(rows) == len(set().union(*cuts)) + 1
    assert "–" not in {cell for row in rows.values() for cell in row}
