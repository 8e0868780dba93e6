"""Amounts as Stripe counts them. Does not import Django.

Stripe's unit is the minor unit of a currency, with exceptions: ISK and UGX have two decimals for compatibility, and MGA
has none. In currencies with three decimals, the last digit must be 0.
Source: https://docs.stripe.com/currencies
"""

from __future__ import annotations

from tenants.currencies import minor_digits

MAX_AMOUNT = 99_999_999  # up to eight digits
_DIGITS = {"ISK": 2, "UGX": 2, "MGA": 0}
_LAST_DIGIT = 10  # multiple of charges in currencies with three decimals


def smallest_charge(currency: str) -> int:
    """Return the cents of which a charge must be a multiple."""
    if minor_digits(currency) == 3:
        return _LAST_DIGIT
    return int(10 ** max(0, minor_digits(currency) - _digits(currency)))


def to_stripe(cents: int, currency: str) -> int:
    """Return an amount in Stripe's unit.

    Raises:
        ValueError: Stripe cannot charge it.
    """
    if cents % smallest_charge(currency):
        raise ValueError(f"the amount is not a multiple of {smallest_charge(currency)}")
    amount = cents * 10 ** _digits(currency) // 10 ** minor_digits(currency)
    if not 0 < amount <= MAX_AMOUNT:
        raise ValueError("the amount is out of range")
    return int(amount)


def from_stripe(amount: int, currency: str) -> int:
    """Return an amount of Stripe in cents.

    Raises:
        ValueError: it has a fraction of a cent.
    """
    cents, rest = divmod(amount * 10 ** minor_digits(currency), 10 ** _digits(currency))
    if rest:
        raise ValueError("the amount has a fraction of the minor unit")
    return int(cents)


def _digits(currency: str) -> int:
    return _DIGITS.get(currency, minor_digits(currency))
