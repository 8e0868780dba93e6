"""The European Central Bank's files of exchange rates. Does not import Django.

A file has the amount of each currency per euro on each day: `eurofxref-hist.csv` and `eurofxref.csv`, or
`eurofxref-daily.xml`, `eurofxref-hist-90d.xml` and `eurofxref-hist.xml`. Decimals are exact. Rates per dollar are
rounded once, half up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from billing.currencies.amounts import DEFAULT_CURRENCY, RATE_DIGITS, half_up
from billing.currencies.iso_codes import CURRENCIES
from tenants import csv_tables

_CUBE = re.compile(
    r"<Cube\s+(?:time=[\"'](?P<day>[^\"']*)[\"']|currency=[\"'](?P<currency>[^\"']*)[\"']\s+rate=[\"'](?P<rate>[^\"']*)[\"'])"
)
_DATE_FORMATS = ("%Y-%m-%d", "%d %B %Y")  # the file of all days, and the file of the newest day
_SCALE = 10**12  # a rate has fewer decimals
_MAX_RATE = 10**6  # units of a currency per euro


class DollarRate(NamedTuple):
    """The amount of a currency per dollar on a day, in millionths."""

    currency: str
    on: date
    micro_per_usd: int


def read_ecb_rates(text: str) -> list[DollarRate]:
    """Return the rates of a file of the European Central Bank, in its order. Currencies that ended are left out.

    Raises:
        ValueError: it is not such a file, or a day or rate is not valid. The message names the line.
    """
    days = _read_xml(text) if text.lstrip("\ufeff \t\r\n").startswith("<") else _read_csv(text)
    found = [rate for line, on, per_euro in days for rate in _per_dollar(line, on, per_euro)]
    if not found:
        raise ValueError("The file has no exchange rates. Use eurofxref-hist.csv or eurofxref-hist-90d.xml.")
    return found


def _read_csv(text: str) -> Iterator[tuple[int, str, dict[str, str]]]:
    reader = csv_tables.read_table(text.lstrip("\ufeff").splitlines())
    columns = [(name or "").strip() for name in reader.fieldnames or []]
    if columns[:1] != ["Date"] or DEFAULT_CURRENCY not in columns:
        raise ValueError(f"line 1: The columns Date and {DEFAULT_CURRENCY} are missing.")
    for row in reader:
        cells = {(name or "").strip(): (value or "").strip() for name, value in row.items() if isinstance(value, str)}
        day = cells.pop("Date", "")
        yield reader.line_num, day, {name: value for name, value in cells.items() if value not in ("", "N/A")}


def _read_xml(text: str) -> Iterator[tuple[int, str, dict[str, str]]]:
    line, day, per_euro, end = 1, "", dict[str, str](), 0
    for match in _CUBE.finditer(text):
        line, end = line + text.count("\n", end, match.start()), match.start()
        if match["day"] is None:
            if not day:
                raise ValueError(f"line {line}: The rate of {match['currency']} belongs to no day.")
            per_euro[match["currency"]] = match["rate"]
            continue
        if day:
            yield line, day, per_euro
        day, per_euro = match["day"], {}
    if day:
        yield line, day, per_euro


def _per_dollar(line: int, day: str, per_euro: Mapping[str, str]) -> Iterator[DollarRate]:
    on = _read_day(line, day)
    dollars = _read_rate(line, DEFAULT_CURRENCY, per_euro.get(DEFAULT_CURRENCY, ""))
    one = 10**RATE_DIGITS
    yield DollarRate("EUR", on, half_up(_SCALE * one, dollars))
    for currency, text in per_euro.items():
        if currency != DEFAULT_CURRENCY and currency in CURRENCIES:
            micro = half_up(_read_rate(line, currency, text) * one, dollars)
            if micro:
                yield DollarRate(currency, on, micro)


def _read_day(line: int, text: str) -> date:
    for style in _DATE_FORMATS:
        try:
            return datetime.strptime(text, style).date()  # noqa: DTZ007  (a day has no time zone)
        except ValueError:
            continue
    raise ValueError(f"line {line}: {text!r} is not a day, such as 2026-11-27.")


def _read_rate(line: int, currency: str, text: str) -> int:
    """Return the amount of a currency per euro, in units of `_SCALE`."""
    try:
        rate = Decimal(text)
    except InvalidOperation:
        rate = Decimal(0)
    if not rate.is_finite() or not 0 < rate < _MAX_RATE or (units := rate * _SCALE) != int(units):
        raise ValueError(f"line {line}: {text!r} is not a rate of {currency}.")
    return int(units)
