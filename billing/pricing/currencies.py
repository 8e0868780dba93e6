"""The currencies in which tenants are billed, and exchange rates between currencies.

A tenant is billed in the currency of its price book. All its amounts are in this currency, and never change it.
"""

from __future__ import annotations

from datetime import date

from billing.amounts import DEFAULT_CURRENCY, PPM, half_up
from billing.models import ExchangeRate, PriceBookAssignment


def currency_of(tenant_id: int) -> str:
    """Return the currency in which a tenant is billed."""
    row = PriceBookAssignment.objects.for_tenant(tenant_id).select_related("book").first()
    return DEFAULT_CURRENCY if row is None else row.book.currency


def exchange_rate(source: str, target: str, on: date) -> int | None:
    """Return the millionths of the target currency per unit of the source, by the newest rates. None: unknown."""
    per_dollar = [_per_dollar(currency, on) for currency in (target, source)]
    if None in per_dollar:
        return None
    numerator, denominator = (rate or 0 for rate in per_dollar)
    return half_up(numerator * PPM, denominator)


def _per_dollar(currency: str, on: date) -> int | None:
    if currency == DEFAULT_CURRENCY:
        return PPM
    rates = ExchangeRate.objects.filter(currency=currency, on__lte=on).order_by("-on")
    return rates.values_list("micro_per_usd", flat=True).first()
