"""Integer amounts of money and their formats. Does not import Django.

femto-USD for costs (tokens x nano-USD per million is exact), nano-USD for credits and the ledger, cents on invoices.
Amounts are rounded only once, and no amount is a float.
"""

from __future__ import annotations

NANO_A_CENT = 10**7
FEMTO_A_CENT = 10**13
PPM = 10**6  # tax rates are in millionths: 8.875 % is 88,750


def half_up(amount: int, unit: int) -> int:
    """Return `amount` in units of `unit`, with halves rounded away from zero."""
    whole = (abs(amount) * 2 + unit) // (2 * unit)
    return whole if amount >= 0 else -whole


def cents(femto: int) -> int:
    """Return an invoice line's amount."""
    return half_up(femto, FEMTO_A_CENT)


def tax(base_cents: int, rate_ppm: int) -> int:
    """Return the tax on a base, in cents."""
    return half_up(base_cents * rate_ppm, PPM)


def decimal(amount: int, digits: int, least: int = 0) -> str:
    """Return `amount` of 10^-digits as decimal text with at least `least` decimals: (620000, 6, 2) is 0.62."""
    whole, rest = divmod(abs(amount), 10**digits)
    fraction = str(rest).zfill(digits).rstrip("0") if digits else ""
    fraction = fraction.ljust(least, "0")
    text = f"{whole}.{fraction}" if fraction else str(whole)
    return f"-{text}" if amount < 0 else text


def dollars(amount_cents: int) -> str:
    """Return cents as dollars for display: −$1,234.50, with a minus sign (U+2212)."""
    whole, rest = divmod(abs(amount_cents), 100)
    return f"{'−' if amount_cents < 0 else ''}${whole:,}.{rest:02}"
