"""Integer amounts of money: units, conversions and formats. Does not import Django.

| unit | USD | amounts |
|---|---|---|
| femto-USD | 10^-15 | costs of usage, since tokens times a price is a whole number of them |
| nano-USD | 10^-9 | prices per million tokens, budgets, reservations, credit and the ledger |
| cent | 10^-2 | lines and totals of invoices, payments |

The used amount of a budget period is in millionths of the budget's unit. For money, these are femto-USD.
Amounts are rounded only once, and no amount is a float. The units of a tenant that is billed in another currency are
those of its currency.
"""

from __future__ import annotations

DEFAULT_CURRENCY = "USD"
_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£"}
FEMTO_DIGITS = 15  # decimals of a dollar in femto-USD
NANO_DIGITS = 9  # decimals of a dollar in nano-USD
NANO_A_DOLLAR = 10**9
NANO_A_CENT = 10**7
FEMTO_A_NANO = 10**6
FEMTO_A_CENT = 10**13
MILLIONTHS = 10**6  # in a nano-USD, token or request of a budget
TOKENS_A_PRICE = 10**6  # a price is per million tokens
PPM = 10**6  # tax rates are in millionths: 8.875 % is 88,750
RATE_DIGITS = 6  # decimals of exchange rates
FINE_RATE_DIGITS = 12  # of exchange rates of low-valued currencies
MAX_BUDGET = 10**17  # nano-USD (100 million dollars), tokens or requests; sums of several fit in a bigint
MAX_NANO_PER_MILLION = 10**18  # nano-USD per million tokens; a higher price is an input error
MIN_TOP_UP_CENTS = 100
MAX_TOP_UP_CENTS = 99_999_999  # the payment provider accepts up to eight digits
MAX_CENTS = 10**12  # of one invoice line or payment


def half_up(amount: int, unit: int) -> int:
    """Return `amount` in units of `unit`, with halves rounded away from zero."""
    whole = (abs(amount) * 2 + unit) // (2 * unit)
    return whole if amount >= 0 else -whole


def cents(femto: int) -> int:
    """Return an invoice line's amount."""
    return half_up(femto, FEMTO_A_CENT)


def whole_units(millionths: int) -> int:
    """Return femto-USD as nano-USD, or millionths of tokens or requests as whole ones, rounded up."""
    return -(-millionths // MILLIONTHS)


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


def symbol(currency: str) -> str:
    """Return what precedes an amount of a currency: $, € or £, or the code and a space."""
    return _SYMBOLS.get(currency, f"{currency} ")


def dollars(amount_cents: int, currency: str = DEFAULT_CURRENCY) -> str:
    """Return cents as dollars, or another currency, for display: −$1,234.50, with a minus sign (U+2212)."""
    whole, rest = divmod(abs(amount_cents), 100)
    return f"{'−' if amount_cents < 0 else ''}{symbol(currency)}{whole:,}.{rest:02}"
