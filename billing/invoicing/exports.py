"""Invoices as HTML and CSV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.template.loader import render_to_string

from billing.currencies.amounts import FEMTO_DIGITS, NANO_DIGITS, decimal, decimal_cents, minor_digits
from billing.invoicing.document import in_words
from tenants import csv_tables

_COLUMNS = (
    *(
        "position",
        "line_type",
        "description",
        "model",
        "tier",
        "component",
        "prompt_length_band",
        "window",
        "price_version",
        "usage_month",
    ),
    *("first_at", "last_at", "events", "tokens"),
)


_OWNERS = ("project", "cost_center")


def html(document: Mapping[str, Any]) -> str:
    """Return the invoice as an HTML page. Its style is a static file."""
    return render_to_string("billing/invoice.html", {"it": in_words(document)})


def as_csv(document: Mapping[str, Any]) -> str:
    """Return the lines as CSV, with the price per million tokens and the exact and rounded amounts, in its currency.

    If the usage is divided, a line of usage has a row for each project and cost center.
    """
    currency = document["currency"].lower()
    is_divided = any("shares" in line for line in document["lines"])
    rows = [
        _row(document, line | share, is_divided) for line in document["lines"] for share in line.get("shares", ({},))
    ]
    owners = _OWNERS if is_divided else ()
    heading = ["invoice", *_COLUMNS, f"{currency}_per_million", f"{currency}_exact", currency, *owners]
    return csv_tables.as_csv(heading, rows)


def _row(document: Mapping[str, Any], line: Mapping[str, Any], is_divided: bool) -> list[csv_tables.Value]:
    price = line["nano_per_million"]
    return [
        *(document["number"], *(line[name] for name in _COLUMNS)),
        "" if price is None else decimal(price, NANO_DIGITS),
        decimal(int(line["femto"]), FEMTO_DIGITS),
        decimal_cents(line["cents"], minor_digits(document["currency"])),
        *((line.get(name, "") for name in _OWNERS) if is_divided else ()),
    ]
