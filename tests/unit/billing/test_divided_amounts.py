"""The division of an invoice line: its parts sum to the line, each within a cent of its exact amount."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.currencies.amounts import cents, divide_cents, femto_a_cent

UNIT = femto_a_cent("USD")


@pytest.mark.parametrize(
    ("parts", "currency", "expected"),
    [
        ([], "USD", []),
        ([UNIT], "USD", [1]),
        ([UNIT // 2] * 3, "USD", [1, 1, 0]),  # 1.5 are 2 cents: the first of equal remainders
        ([UNIT // 4, UNIT // 2, UNIT // 4], "USD", [0, 1, 0]),
        ([UNIT // 3] * 3, "USD", [1, 0, 0]),  # 0.99… are a cent
        ([0, 5 * UNIT, 0], "USD", [0, 5, 0]),
        ([-UNIT // 2, 2 * UNIT], "USD", [0, 2]),
        ([60 * UNIT, 60 * UNIT], "JPY", [1, 0]),  # 1.20 yen are 1
    ],
)
def test_parts_are_rounded_by_the_largest_remainders(parts, currency, expected):
    assert divide_cents(parts, currency) == expected


@given(st.lists(st.integers(0, 10**20), max_size=30), st.sampled_from(["USD", "JPY", "KWD"]))
def test_parts_sum_to_their_line(parts, currency):
    found = divide_cents(parts, currency)
    assert sum(found) == cents(sum(parts), currency)
    unit = femto_a_cent(currency)
    assert all(abs(amount * unit - part) < unit for amount, part in zip(found, parts, strict=True))
