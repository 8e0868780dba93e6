"""Minor units of currencies (ISO 4217), and amounts as texts. Does not import Django."""

from __future__ import annotations

DEFAULT_CURRENCY = "USD"
DEFAULT_MINOR_DIGITS = 2
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
