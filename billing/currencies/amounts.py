"""Integer amounts of money: units, conversions and formats. Does not import Django.

| unit | USD | amounts |
|---|---|---|
| femto-USD | 10^-15 | costs of usage, since tokens times a price is a whole number of them |
| nano-USD | 10^-9 | prices per million tokens, budgets, reservations, credit and the ledger |
| cent | 10^-2 | lines and totals of invoices, payments |

A cent is the minor unit of any currency: 10^-2 EUR, but 1 JPY and 10^-3 KWD (ISO 4217).

The used amount of a budget period is in millionths of the budget's unit. For money, these are femto-USD.
Amounts are rounded only once, and no amount is a float. The units of a tenant that is billed in another currency are
those of its currency.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenants.currencies import DEFAULT_CURRENCY as DEFAULT_CURRENCY
from tenants.currencies import NANO_DIGITS as NANO_DIGITS
from tenants.currencies import decimal as decimal
from tenants.currencies import dollars as dollars
from tenants.currencies import exact_amount as exact_amount
from tenants.currencies import minor_digits as minor_digits
from tenants.currencies import symbol as symbol

FEMTO_DIGITS = 15  # decimals of a dollar in femto-USD
NANO_A_DOLLAR = 10**9
NANO_A_CENT = 10**7  # USD
FEMTO_A_NANO = 10**6
FEMTO_A_CENT = 10**13  # USD
MILLIONTHS = 10**6  # in a nano-USD, token or request of a budget
TOKENS_A_PRICE = 10**6  # a price is per million tokens
PPM = 10**6  # tax rates are in millionths: 8.875 % is 88,750
RATE_DIGITS = 6  # decimals of exchange rates
FINE_RATE_DIGITS = 12  # decimals for low-valued currencies
MAX_BUDGET = 10**17  # nano-USD (100 million dollars), tokens or requests; sums of several fit in a bigint
MAX_BALANCE = 4 * 10**18  # maximum gate of a prepaid tenant: all that it ever used, and its balance
MAX_NANO_PER_MILLION = 10**18  # nano-USD per million tokens; a higher price is an input error
MIN_TOP_UP_CENTS = 100
MAX_TOP_UP_CENTS = 99_999_999  # the payment provider accepts up to eight digits
MAX_CENTS = 10**11  # one invoice line or payment
MAX_NANO = 10**18  # the same in nano-USD: the ledger's amounts are 64-bit integers


def half_up(amount: int, unit: int) -> int:
    """Return `amount` in units of `unit`, with halves rounded away from zero."""
    whole = (abs(amount) * 2 + unit) // (2 * unit)
    return whole if amount >= 0 else -whole


def nano_a_cent(currency: str) -> int:
    """Return the nano-units of a currency in its minor unit."""
    return int(10 ** (NANO_DIGITS - minor_digits(currency)))


def femto_a_cent(currency: str) -> int:
    """Return the femto-units of a currency in its minor unit."""
    return int(10 ** (FEMTO_DIGITS - minor_digits(currency)))


def cents(femto: int, currency: str) -> int:
    """Return an invoice line's amount in the minor unit of its currency."""
    return half_up(femto, femto_a_cent(currency))


def divide_cents(parts: Sequence[int], currency: str) -> list[int]:
    """Return the parts of an invoice line in the minor unit of its currency, so that they sum to the line's amount.

    Parts are rounded down, and the rest goes to those with the largest remainders; of equal ones, to the first.
    """
    unit = femto_a_cent(currency)
    rounded = [part // unit for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda place: parts[place] % unit, reverse=True)
    for place in by_remainder[: cents(sum(parts), currency) - sum(rounded)]:
        rounded[place] += 1
    return rounded


def whole_units(millionths: int) -> int:
    """Return femto-USD as nano-USD, or millionths of tokens or requests as whole ones, rounded up."""
    return -(-millionths // MILLIONTHS)


def tax(base_cents: int, rate_ppm: int) -> int:
    """Return the tax on a base, in cents."""
    return half_up(base_cents * rate_ppm, PPM)


def decimal_cents(amount_cents: int, digits: int) -> str:
    """Return an amount in a minor unit with all its decimals: (150, 2) is 1.50, (150, 0) is 150."""
    return decimal(amount_cents, digits, digits)
