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


def html(document: Mapping[str, Any]) -> str:
    """Return the invoice as an HTML page. Its style is a static file."""
    return render_to_string("billing/invoice.html", {"it": in_words(document)})


def as_csv(document: Mapping[str, Any]) -> str:
    """Return the lines as CSV, with the price per million tokens and the exact and rounded amounts, in its currency."""
    rows, currency = [], document["currency"].lower()
    for line in document["lines"]:
        price = line["nano_per_million"]
        amounts = (
            "" if price is None else decimal(price, NANO_DIGITS),
            decimal(int(line["femto"]), FEMTO_DIGITS),
            decimal_cents(line["cents"], minor_digits(document["currency"])),
        )
        rows.append([document["number"], *(line[name] for name in _COLUMNS), *amounts])
    return csv_tables.as_csv(["invoice", *_COLUMNS, f"{currency}_per_million", f"{currency}_exact", currency], rows)
