"""The month of the invoices in tests: the newest one that the product can close, at any minute."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from billing.periods import close_after, month_bounds
from tests.support.billing.books import newest_closable_month

MINUTE = timedelta(minutes=1)


def test_the_newest_month_that_can_be_closed() -> None:
    for year, month in ((2026, 12), (2027, 1), (2028, 3)):
        start, _ = month_bounds("UTC", year, month)
        for minute in range(-60, 61):
            now = start + minute * MINUTE
            found = newest_closable_month(now)
            _, end = month_bounds("UTC", found.year, found.month)
            _, next_end = month_bounds("UTC", end.year, end.month)
            assert end + close_after() <= now < next_end + close_after()


def test_the_first_minutes_of_a_month_still_have_the_month_before_the_previous_one() -> None:
    assert newest_closable_month(datetime(2026, 12, 1, 0, 5, tzinfo=UTC)) == datetime(2026, 10, 1, tzinfo=UTC)
    assert newest_closable_month(datetime(2026, 12, 1, 1, tzinfo=UTC)) == datetime(2026, 11, 1, tzinfo=UTC)
