"""The invoice as HTML and as CSV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.template.loader import render_to_string

from billing.amounts import decimal
from billing.invoicing.document import in_words
from tenants import csv_tables

_COLUMNS = (
    *("position", "kind", "description", "model", "tier", "component", "band", "window", "price_version", "late_from"),
    *("first_at", "last_at", "events", "tokens"),
)


def html(document: Mapping[str, Any]) -> str:
    """Return a page that stands alone; its style is a static file."""
    return render_to_string("billing/invoice.html", {"it": in_words(document)})


def as_csv(document: Mapping[str, Any]) -> str:
    """Return the lines, with the price of a million tokens, the exact amount and the rounded one in dollars."""
    rows = []
    for line in document["lines"]:
        price = line["nano_per_million"]
        amounts = (
            "" if price is None else decimal(price, 9),
            decimal(int(line["femto"]), 15),
            decimal(line["cents"], 2, 2),
        )
        rows.append([document["number"], *(line[name] for name in _COLUMNS), *amounts])
    return csv_tables.as_csv(["invoice", *_COLUMNS, "usd_per_million", "usd_exact", "usd"], rows)
