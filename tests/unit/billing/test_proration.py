"""Proration of the first month of a charge by days."""

from __future__ import annotations

from datetime import date
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.rates.proration import DayShare, day_share


@pytest.mark.parametrize(
    ("starts_on", "month", "share"),
    [
        (date(2026, 10, 20), "2026-10", DayShare(12, 31)),
        (date(2026, 10, 1), "2026-10", DayShare(31, 31)),
        (date(2026, 10, 31), "2026-10", DayShare(1, 31)),
        (date(2028, 2, 29), "2028-02", DayShare(1, 29)),
        (date(2026, 10, 20), "2026-11", DayShare(30, 30)),
        (date(2026, 10, 20), "2027-10", DayShare(31, 31)),
        (None, "2026-02", DayShare(28, 28)),
    ],
)
def test_the_days_of_a_month(starts_on, month, share):
    assert day_share(starts_on, month) == share


def test_amounts_are_rounded_half_up():
    assert DayShare(12, 31).prorate(5_000) == 1_935  # 1935.48
    assert DayShare(15, 30).prorate(1) == 1
    assert DayShare(14, 30).prorate(1) == 0


@given(st.integers(0, 10**18), st.integers(1, 31))
def test_the_parts_of_a_month_differ_by_less_than_a_unit(amount, days):
    first, rest = DayShare(days, 31).prorate(amount), DayShare(31 - days, 31).prorate(amount)
    assert abs(first + rest - amount) <= 1
    assert abs(first - Fraction(amount * days, 31)) <= Fraction(1, 2)
    assert DayShare(31, 31).prorate(amount) == amount


def test_only_a_part_is_described():
    assert DayShare(12, 31).describe("Base") == "Base (12 of 31 days)"
    assert DayShare(31, 31).describe("Base") == "Base"
