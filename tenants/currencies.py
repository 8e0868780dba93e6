"""Minor units of currencies (ISO 4217), and amounts as texts. Does not import Django."""

from __future__ import annotations

DEFAULT_CURRENCY = "USD"
DEFAULT_MINOR_DIGITS = 2
NANO_DIGITS = 9  # decimals of a nano-unit: 10^-9 of a currency, in which prices, budgets and credit are
_WITHOUT_DECIMALS = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX VND VUV XAF XOF XPF"
_THREE_DECIMALS = "BHD IQD JOD KWD LYD OMR TND"
_MINOR_DIGITS = dict.fromkeys(_WITHOUT_DECIMALS.split(), 0) | dict.fromkeys(_THREE_DECIMALS.split(), 3)
_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£"}


def minor_digits(currency: str) -> int:
    """Return the decimals of a currency's minor unit: 2 of USD, 0 of JPY, 3 of KWD."""
    return _MINOR_DIGITS.get(currency, DEFAULT_MINOR_DIGITS)


def symbol(currency: str) -> str:
    """Return what precedes an amount of a currency: $, € or £, or the code and a space."""
    return _SYMBOLS.get(currency, f"{currency} ")


def dollars(amount_cents: int, currency: str = DEFAULT_CURRENCY) -> str:
    """Return cents as dollars, or another currency, for display: −$1,234.50, with a minus sign (U+2212)."""
    digits = minor_digits(currency)
    whole, rest = divmod(abs(amount_cents), 10**digits)
    fraction = f".{rest:0{digits}}" if digits else ""
    return f"{'−' if amount_cents < 0 else ''}{symbol(currency)}{whole:,}{fraction}"


def exact_amount(nano: int, currency: str = DEFAULT_CURRENCY) -> str:
    """Return nano-units as an amount for display, with all their digits: $1,234.50, JPY 0.0042, −€3.00."""
    return currency_text(decimal(nano, NANO_DIGITS), currency)


def currency_text(text: str, currency: str = DEFAULT_CURRENCY) -> str:
    """Return an amount in decimals, such as -1234.5, for display: −$1,234.50, with a minus sign (U+2212)."""
    whole, _, fraction = text.removeprefix("-").partition(".")
    fraction = fraction.rstrip("0").ljust(minor_digits(currency), "0")
    shown = f"{symbol(currency)}{int(whole or 0):,}{'.' if fraction else ''}{fraction}"
    return f"−{shown}" if text.startswith("-") else shown


def decimal(amount: int, digits: int, least: int = 0) -> str:
    """Return `amount` of 10^-digits as decimal text with at least `least` decimals: (620000, 6, 2) is 0.62."""
    whole, rest = divmod(abs(amount), 10**digits)
    fraction = str(rest).zfill(digits).rstrip("0") if digits else ""
    fraction = fraction.ljust(least, "0")
    text = f"{whole}.{fraction}" if fraction else str(whole)
    return f"-{text}" if amount < 0 else text
