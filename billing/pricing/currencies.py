"""The currencies in which tenants are billed, and exchange rates between currencies.

A tenant is billed in the currency of its price book. All its amounts are in this currency, and never change it.
"""

from __future__ import annotations

from datetime import date
from typing import NamedTuple

from billing.currencies.amounts import DEFAULT_CURRENCY, FINE_RATE_DIGITS, PPM, RATE_DIGITS, half_up
from billing.models import ExchangeRate, PriceBookAssignment

_FINE_FROM = 5 * PPM  # units of a currency per dollar, from which its rates need more decimals


class CrossRate(NamedTuple):
    """The amount of a currency per unit of another one, in units of 10^-digits."""

    units: int
    digits: int

    def convert(self, amount: int, more_digits: int = 0) -> int:
        """Return an amount in the other currency, rounded half up.

        Args:
            more_digits: how many more decimals the result's unit has than the amount's; negative: fewer.
        """
        whole, part = 10 ** max(more_digits, 0), 10 ** max(-more_digits, 0)
        return half_up(amount * self.units * whole, 10**self.digits * part)


def currency_of(tenant_id: int) -> str:
    """Return the currency in which a tenant is billed."""
    row = PriceBookAssignment.objects.for_tenant(tenant_id).select_related("book").first()
    return DEFAULT_CURRENCY if row is None else row.book.currency


def other_currencies() -> dict[int, str]:
    """Return the currency of each tenant that is not billed in USD; inside `all_tenants_scope(…)`."""
    rows = PriceBookAssignment.objects.all_tenants().exclude(book__currency=DEFAULT_CURRENCY)
    return dict(rows.values_list("tenant_id", "book__currency"))


def dollar_rates(on: date) -> dict[str, CrossRate]:
    """Return the dollars per unit of each currency that tenants are billed in and that has an exchange rate."""
    currencies = {DEFAULT_CURRENCY, *other_currencies().values()}
    rates = {currency: exchange_rate(currency, DEFAULT_CURRENCY, on) for currency in currencies}
    return {currency: rate for currency, rate in rates.items() if rate is not None}


class DatedRate(NamedTuple):
    """A rate with its day: the earlier one, if it is computed from the rates of two currencies."""

    rate: CrossRate
    on: date


def exchange_rate(source: str, target: str, on: date) -> CrossRate | None:
    """Return the target currency per unit of the source, by the newest rates. None: unknown."""
    found = dated_rate(source, target, on)
    return None if found is None else found.rate


def dated_rate(source: str, target: str, on: date, digits: int | None = None) -> DatedRate | None:
    """Return the target currency per unit of the source with its day, by the newest rates. None: unknown.

    Args:
        digits: decimals. By default, rates of a low-valued source have more, so that at least five are significant.
    """
    new, old = _per_dollar(target, on), _per_dollar(source, on)
    if new is None or old is None:
        return None
    (numerator, first), (denominator, second) = new, old
    if digits is None:
        digits = FINE_RATE_DIGITS if denominator >= _FINE_FROM else RATE_DIGITS
    return DatedRate(CrossRate(half_up(numerator * 10**digits, denominator), digits), min(first, second))


def _per_dollar(currency: str, on: date) -> tuple[int, date] | None:
    if currency == DEFAULT_CURRENCY:
        return PPM, on
    rates = ExchangeRate.objects.filter(currency=currency, on__lte=on).order_by("-on")
    return rates.values_list("micro_per_usd", "on").first()
