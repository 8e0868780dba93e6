from __future__ import annotations

from collections.abc import Callable

import pytest
from django.utils import translation

from frontend.core.charts import format_value
from frontend.core.numbers import (
    Margin,
    Money,
    common_places,
    compact,
    decimals,
    duration,
    exact,
    exact_places,
    percent,
    points,
    share,
    signed_share,
)
from tests.support.frontend import number_cases

LANGUAGES = ("en", "de")


def in_languages(show: Callable[[], str]) -> tuple[str, ...]:
    """Return a text in each language of the cases."""
    texts = []
    for language in LANGUAGES:
        with translation.override(language):
            texts.append(show())
    return tuple(texts)


@pytest.mark.parametrize("case", number_cases.COUNTS, ids=str)
def test_compact(case):
    value, *texts = case
    assert in_languages(lambda: compact(value)) == tuple(texts)


@pytest.mark.parametrize("case", number_cases.SHARES, ids=str)
def test_share(case):
    part, whole, *texts = case
    assert in_languages(lambda: share(part, whole)) == tuple(texts)
    assert in_languages(lambda: percent(part / whole)) == tuple(texts)


@pytest.mark.parametrize("case", number_cases.DURATIONS, ids=str)
def test_duration(case):
    time, *texts = case
    assert in_languages(lambda: duration(time)) == tuple(texts)


@pytest.mark.parametrize("case", number_cases.AMOUNTS, ids=str)
def test_amounts(case):
    millionths, currency, symbol, digits, *texts = case
    amount = Money(millionths * 10**9, currency)
    assert (amount.symbol, amount.digits) == (symbol, digits)
    assert in_languages(lambda: amount.text) == tuple(texts)


@pytest.mark.parametrize("case", number_cases.COLUMNS, ids=str)
def test_amounts_in_columns(case):
    millionths, places, *texts = case
    assert in_languages(lambda: "".join(Money(millionths * 10**9, "USD").parts_at(places))) == tuple(texts)


def test_shares_without_a_whole_and_changes():
    assert (share(0, 0), signed_share(1, 0)) == ("–", "–")
    assert [signed_share(part, 1000) for part in (124, -5, 0)] == ["+12.4%", "−0.50%", "0.00%"]
    assert in_languages(lambda: points(decimals(1.25))) == ("1.3 points", "1,3 Punkte")
    assert [decimals(value) for value in (1234.45, -0.05, 0.04, 2)] == ["1,234.5", "−0.1", "0.0", "2.0"]


@pytest.mark.parametrize(
    ("femto", "places", "shown"),
    [
        ([], 2, []),
        ([0, 10**15], 2, ["$0.00", "$1.00"]),
        ([10**13, 1234 * 10**15], 2, ["$0.01", "$1,234.00"]),
        ([42 * 10**11, -(10**15)], 4, ["$0.0042", "−$1.0000"]),
        ([10**12, 15 * 10**12], 4, ["$0.0010", "$0.0150"]),
        ([21 * 10**9, 6 * 10**15], 6, ["$0.000021", "$6.000000"]),
        ([10**5, 10**13], 9, ["<$0.000000001", "$0.010000000"]),
    ],
)
def test_a_column_of_amounts(femto, places, shown):
    amounts = [Money(value) for value in femto]
    assert common_places([*amounts, None]) == places
    assert ["".join(amount.parts_at(places)) for amount in amounts] == shown


@pytest.mark.parametrize(
    ("amount", "shown", "exact_text"),
    [
        (Money.cents(1_234_567, "JPY"), "JPY 1,234,567", "JPY 1234567"),
        (Money.cents(-5, "JPY"), "−JPY 5", "JPY -5"),
        (Money(15 * 10**14, "JPY"), "JPY 2", "JPY 1.5"),
        (Money(42 * 10**12, "JPY"), "JPY 0.042", "JPY 0.042"),
        (Money(0, "JPY"), "JPY 0", "JPY 0"),
        (Money.cents(1_234_567, "KWD"), "KWD 1,234.567", "KWD 1234.567"),
        (Money(5 * 10**11, "KWD"), "KWD 0.0005", "KWD 0.0005"),
        (Money(15 * 10**11, "KWD"), "KWD 0.002", "KWD 0.0015"),
    ],
)
def test_amounts_have_the_decimals_of_their_currency(amount, shown, exact_text):
    assert (amount.text, amount.exact_text) == (shown, exact_text)


def test_columns_have_at_least_the_decimals_of_their_currency():
    yen, fils = [Money.cents(5, "JPY"), Money.cents(1500, "JPY")], [Money.cents(5, "KWD"), None]
    assert (common_places(yen), common_places(fils)) == (0, 3)
    assert ["".join(amount.parts_at(0)) for amount in yen] == ["JPY 5", "JPY 1,500"]
    assert common_places([Money(42 * 10**12, "JPY")]) == 3
    assert (exact_places(yen), exact_places([Money(15 * 10**14, "JPY")])) == (0, 1)


def test_a_column_with_all_digits():
    assert exact_places([]) == 2
    assert exact_places([Money(10**15), Money(45 * 10**11)]) == 4
    assert exact_places([Money(1)]) == 15


def test_exact():
    assert exact(12_510_000) == "12,510,000"


@pytest.mark.parametrize(
    ("price", "cost", "share"),
    [
        (1000, 376, "62.4%"),
        (1000, 1000, "0.00%"),
        (3, 2, "33.3%"),
        (1000, 1350, "−35.0%"),
        (10_000, 10_001, "−0.01%"),
        (100, 1950, "−1,850%"),
        (0, 5, ""),
        (0, 0, ""),
    ],
)
def test_a_margin_is_a_part_of_the_price(price, cost, share):
    margin = Margin(price, cost)
    assert (margin.share, margin.is_loss, margin.amount.femto) == (share, cost > price, price - cost)


def test_numbers_with_all_digits_have_the_separators_of_the_language():
    amount = Money(8587_301_200_000_000_000)
    assert (amount.exact_text, Money(5 * 10**15).exact_text) == ("$8587.3012", "$5.00")
    assert format_value(110_849, "percent") == "11.1%"
    with translation.override("de"):
        assert (amount.exact, amount.exact_text) == ("8587.3012", "8587,3012\N{NO-BREAK SPACE}$")
        assert format_value(110_849, "percent") == "11,1%"
