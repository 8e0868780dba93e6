"""Amounts as texts, in the currencies of tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.currencies import currency_text, dollars, exact_amount, minor_digits

CURRENCIES = ["USD", "EUR", "GBP", "JPY", "KWD", "CHF"]


@pytest.mark.parametrize(
    ("nano", "currency", "text"),
    [
        (0, "USD", "$0.00"),
        (1_234_500_000_000, "USD", "$1,234.50"),
        (91_440_000, "EUR", "€0.09144"),
        (1, "GBP", "£0.000000001"),
        (-3 * 10**9, "EUR", "−€3.00"),
        (1_234 * 10**9, "JPY", "JPY 1,234"),
        (4_200_000, "JPY", "JPY 0.0042"),
        (1_500_000_000, "KWD", "KWD 1.500"),
        (10**17, "CHF", "CHF 100,000,000.00"),
    ],
)
def test_nano_units_have_all_their_digits(nano: int, currency: str, text: str) -> None:
    assert exact_amount(nano, currency) == text


@given(st.integers(-(10**12), 10**12), st.sampled_from(CURRENCIES))
def test_whole_minor_units_are_as_on_documents(cents: int, currency: str) -> None:
    assert exact_amount(cents * 10 ** (9 - minor_digits(currency)), currency) == dollars(cents, currency)


@given(st.integers(-(10**18), 10**18), st.sampled_from(CURRENCIES))
def test_no_digit_is_lost(nano: int, currency: str) -> None:
    text = exact_amount(nano, currency)
    whole, _, fraction = "".join(each for each in text if each.isdigit() or each == ".").partition(".")
    assert int(whole + fraction.ljust(9, "0")) == abs(nano)
    assert text.startswith("−") == (nano < 0)
    assert ("$" in text) == (currency == "USD")


def test_decimals_beyond_nano_units_are_shown() -> None:
    assert currency_text("0.000000000001", "USD") == "$0.000000000001"
