"""Buyers in other EU countries than the seller's, whose supplies tax reports and exports name."""

from __future__ import annotations

from typing import NamedTuple

from billing.currencies.iso_codes import EU_COUNTRIES
from billing.models import Invoice
from billing.taxes import vat_ids


class EuBuyer(NamedTuple):
    """A buyer in another EU country than the seller's. `vat_id` is empty for a consumer."""

    country: str
    vat_id: str


def find_eu_buyer(document: Invoice) -> EuBuyer | None:
    """Return the buyer of a document; of a note, that of its invoice. None: the buyer is in no other EU country."""
    buyer = (document.refers_to or document).buyer
    country, vat_id = buyer["country"], buyer["vat_id"]
    if country not in EU_COUNTRIES or country == document.seller["country"]:
        return None
    return EuBuyer(country, vat_ids.compact(vat_id) if vat_id and vat_ids.is_valid(country, vat_id) else "")
