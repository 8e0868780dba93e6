"""Tables, single objects and JSON on standard output, with color on a terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

NANO_PER_USD = 10**9
DEFAULT_CURRENCY = "USD"
WIDE = 100_000  # columns of a table that goes to a file or a pipe: nothing is cut off or wrapped
_GOOD = {"active", "ready", "ok", "open", "paid", "completed", "delivered", "published", "yes"}
_BAD = {"failed", "suspended", "revoked", "past due", "uncollectible", "refused", "limited", "no", "not ready"}


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, the value's field or function, and its format. `tokens.input` is in an object."""

    title: str
    value: str | Callable[[Any], Any]
    format: Callable[[Any], str] = str
    right: bool = False

    def text_of(self, row: Mapping[str, Any]) -> str:
        value: Any = row if isinstance(self.value, str) else self.value(row)
        for name in self.value.split(".") if isinstance(self.value, str) else ():
            value = value and value.get(name)
        return "–" if value is None or value == "" else printable(self.format(value))


def number(value: int) -> str:
    return f"{value:,}"


def size(num_bytes: int) -> str:
    """Return a number of bytes in the largest unit below it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


_tenant_currency: ContextVar[Callable[[], str]] = ContextVar("currency of the tenant", default=lambda: DEFAULT_CURRENCY)


@contextmanager
def tenant_currency(find: Callable[[], str]) -> Iterator[None]:
    """Print the amounts of a tenant in its currency. `find` is called for the first amount, and only then."""
    token = _tenant_currency.set(cache(find))
    try:
        yield
    finally:
        _tenant_currency.reset(token)


def amount(text: str) -> str:
    """Return an amount of the tenant that the API gives as decimal text, in the tenant's currency."""
    return money(text, _tenant_currency.get()())


def nano_amount(value: int) -> str:
    """Return nano-units of the tenant's currency, exactly."""
    return amount(decimal(value))


def usd(text: str) -> str:
    """Return dollars that the API gives as decimal text, with at least two decimals."""
    return money(text, DEFAULT_CURRENCY)


def nano_usd(value: int) -> str:
    """Return nano-USD as dollars, exactly."""
    return usd(decimal(value))


def money(text: str, currency: str) -> str:
    """Return an amount in decimals in a currency, with a hyphen as the minus sign: -$12.50, JPY 1,250."""
    from tenants.currencies import currency_text  # commands without amounts do not need it

    return currency_text(text, currency).replace("−", "-", 1)


def cents(value: int, currency: str = DEFAULT_CURRENCY) -> str:
    """Return cents, or the minor unit of another currency, with a hyphen as the minus sign: -$12.50, JPY 1,250."""
    from tenants.currencies import dollars

    return dollars(value, currency).replace("−", "-", 1)


def decimal(nano: int) -> str:
    """Return nano-units as a decimal amount."""
    sign, nano = ("-" if nano < 0 else ""), abs(nano)
    return f"{sign}{nano // NANO_PER_USD}.{nano % NANO_PER_USD:09}"


def amount_of(name: str) -> Callable[[Any], str]:
    """Return a function that returns a document's amount in its currency."""
    return lambda row: cents(row[name], row["currency"])


_AMOUNT = re.compile(r"\$?(\d{1,15}|\d{1,3}(,\d{3}){1,4})(\.\d{1,12})?")


def parse_tenant_amount(text: str, name: str, option: str) -> int:
    """Return a decimal amount in the tenant's currency in nano-units."""
    if text.startswith("$") and (currency := _tenant_currency.get()()) != DEFAULT_CURRENCY:
        raise click.UsageError(f"{option} {text!r} is not valid: the tenant's currency is {currency}. Omit the $.")
    return parse_amount(text, name, NANO_PER_USD, option)


def parse_amount(text: str, name: str, per_unit: int, option: str) -> int:
    """Return a decimal amount as an integer of a smaller unit, exactly. A comma only separates thousands."""
    digits = len(str(per_unit)) - 1
    if _AMOUNT.fullmatch(text):
        value = Decimal(text.replace(",", "").removeprefix("$")) * per_unit
        if value == value.to_integral_value():
            return int(value)
    precision = f"at most {digits} decimals and a point, such as 12.50" if digits else "no decimals, such as 50"
    raise click.UsageError(f"{option} {text!r} is not valid: give {name} as a number with {precision}.")


def amount_in_cents(text: str, currency: str, option: str) -> int:
    """Return a decimal amount in cents, or in the minor unit of another currency."""
    from tenants.currencies import minor_digits

    return parse_amount(text, currency, 10 ** minor_digits(currency), option)


def moment(value: str) -> str:
    """Return a time of the API in UTC, to the minute."""
    return datetime.fromisoformat(value).astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def milliseconds(value: int) -> str:
    return f"{value} ms"


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def join_values(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def printable(text: str) -> str:
    """Return a line without control characters, which could change the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], empty: str) -> None:
    """Print rows as a table, or the text `empty`."""
    if not rows:
        print(empty)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_style_text(column.text_of(row)) for column in columns))
    _console().print(table)


def print_fields(row: Mapping[str, Any], columns: Sequence[Column]) -> None:
    """Print an object, one line for each field."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for column in columns:
        table.add_row(column.title, _style_text(column.text_of(row)))
    _console().print(table)


def _style_text(text: str) -> Any:
    from rich.text import Text

    return Text(text, style="green" if text in _GOOD else "red" if text in _BAD else "")


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=False, width=None if sys.stdout.isatty() else WIDE, highlight=False)


def price_columns(format: Callable[[str], str]) -> list[Column]:
    """Return the columns of prices, which `format` prints."""
    return [
        Column("model", "model"),
        Column("tier", "tier"),
        Column("component", "component"),
        Column("per million", "usd_per_million", format, right=True),
        Column("from tokens", "from_tokens", number, right=True),
        Column("from", "from_time"),
        Column("until", "until_time"),
    ]
