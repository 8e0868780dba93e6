"""Proration of monthly amounts in the first month of a charge, by days. Does not import Django."""

from __future__ import annotations

from calendar import monthrange
from datetime import date
from typing import NamedTuple

from billing.currencies.amounts import half_up


class DayShare(NamedTuple):
    """The days of a month that are charged."""

    days: int
    month_days: int

    def prorate(self, amount: int) -> int:
        """Return the part of a monthly amount, rounded half up."""
        return half_up(amount * self.days, self.month_days)

    def describe(self, text: str) -> str:
        """Return the text of a charge with the charged days, if they are not all."""
        return text if self.days == self.month_days else f"{text} ({self.days} of {self.month_days} days)"


def day_share(starts_on: date | None, month: str) -> DayShare:
    """Return the days of a month, such as 2026-11, that are charged: in the month of `starts_on` those from it on."""
    year, number = map(int, month.split("-"))
    days = monthrange(year, number)[1]
    is_first = starts_on is not None and (starts_on.year, starts_on.month) == (year, number)
    return DayShare(days + 1 - starts_on.day if starts_on is not None and is_first else days, days)
