"""CSV files: the only module that writes or reads them. Imports no Django.

A cell that a spreadsheet would take for a formula gets an apostrophe in front, which makes it a text. `unguarded`
removes it. Numbers stay numbers, negative ones too. Lines end as RFC 4180 says. A cell with a separator of any locale,
a quote or a line break is quoted.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from decimal import Decimal

Value = str | int | float | Decimal | date | None
Error = csv.Error

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?", re.ASCII)
_FORMULA_STARTS = "=+-@\N{MINUS SIGN}"
_BREAKS = ("\t", "\r", "\n")
_INVISIBLE = "\0\N{ZERO WIDTH SPACE}\N{WORD JOINER}\N{ZERO WIDTH NO-BREAK SPACE}"
_QUOTED = re.compile(r'[",;\t\r\n|]|^\s|\s$')


def as_csv(heading: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Return a table as CSV. A row may be shorter than the heading."""
    return "".join(csv_lines(heading, rows))


def csv_lines(heading: Sequence[str], rows: Iterable[Sequence[Value]]) -> Iterator[str]:
    """Yield the lines of a table as CSV, each with its line break."""
    yield _line(heading)
    yield from map(_line, rows)


def guard_cell(text: str) -> str:
    """Return a text that no spreadsheet evaluates, and that it shows as it is."""
    return f"'{text}" if _is_formula(text.lstrip("'")) else text


def unguard_cell(text: str) -> str:
    """Return the text that `guarded` was given."""
    return text[1:] if text.startswith("'") and _is_formula(text.lstrip("'")) else text


def read_rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows of a CSV file.

    Raises:
        Error: it is malformed.
    """
    return csv.reader(lines)


def read_table(lines: Iterable[str], *, strict: bool = False) -> csv.DictReader[str]:
    """Return a reader of the rows below the heading, as mappings from the names of the columns.

    Raises:
        Error: while it is read, if it is malformed.
    """
    return csv.DictReader(lines, strict=strict)


def _line(row: Sequence[Value]) -> str:
    cells = [_cell(value) for value in row]
    return ('""' if cells == [""] else ",".join(cells)) + "\r\n"


def _cell(value: Value) -> str:
    text = "" if value is None else guard_cell(value) if isinstance(value, str) else str(value)
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _is_formula(text: str) -> bool:
    if _NUMBER.fullmatch(text):
        return False
    start = text.lstrip(_INVISIBLE)
    if start.startswith(_BREAKS):
        return True
    start = start.lstrip().lstrip(_INVISIBLE)
    # Spreadsheets take full-width and other variants of these signs too: NFKC maps them to the plain ones.
    return unicodedata.normalize("NFKC", start[:1])[:1] in tuple(_FORMULA_STARTS)
