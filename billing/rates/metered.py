"""Costs of metered usage, which is not part of a request. Does not import Django.

A price is in nano-USD per million token-hours or machine-hours. Earlier releases also recorded searches.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from billing.currencies.amounts import decimal, half_up
from billing.rates.pricing import METERED, Component

MAX_AMOUNT = 10**12  # tokens or machines of one record
MAX_TIME = timedelta(days=31)  # duration of one record
_MICROSECONDS_AN_HOUR = 3600 * 10**6
_DIGITS = 3  # decimals of hours for display

__all__ = ["MAX_AMOUNT", "MAX_TIME", "METERED", "metered_amount", "metered_cost", "metered_units"]


def metered_units(component: Component, amount: int, started_at: datetime, ended_at: datetime) -> int:
    """Return an amount over a time in microsecond units, or the number of searches."""
    if component not in METERED:
        return amount
    return amount * ((ended_at - started_at) // timedelta(microseconds=1))


def metered_cost(component: Component, units: int, nano_per_million: int) -> int:
    """Return the cost of units in femto-USD, rounded half up."""
    return half_up(units * nano_per_million, units_an_hour(component))


def metered_amount(component: Component, units: int) -> str:
    """Return units for display: "Cache storage: 150000 token-hours"."""
    thousandths = half_up(units * 10**_DIGITS, units_an_hour(component))
    return f"{component.invoice_label}: {decimal(thousandths, _DIGITS)} {component.unit}"


def units_an_hour(component: Component) -> int:
    """Return the number of units in a token-hour or machine-hour, or 1 for searches."""
    return _MICROSECONDS_AN_HOUR if component in METERED else 1
