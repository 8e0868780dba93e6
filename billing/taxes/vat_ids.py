"""Validation of VAT identification numbers: their format and check digits, per country."""

from __future__ import annotations

import re

from stdnum import get_cc_module
from stdnum.eu import vat as eu_vat

from billing.currencies.iso_codes import EU_COUNTRIES

# Countries whose VAT IDs start with other letters than the country code.
_PREFIXES = {"GR": "EL"}
_NORTHERN_IRELAND = "XI"
_SEPARATORS = re.compile(r"[\s.\-/]")
_OTHER = re.compile(r"(?=.*\d)[A-Z0-9]{4,20}\Z")  # numbers of countries without a known format


def compact(vat_id: str) -> str:
    """Return the VAT ID in capitals, without spaces and separators."""
    return _SEPARATORS.sub("", vat_id).upper()


def prefix_of(country: str) -> str:
    """Return the letters with which VAT IDs of an EU country start."""
    return _PREFIXES.get(country, country)


def is_valid(country: str, vat_id: str) -> bool:
    """Return whether the VAT ID has the format and the check digits of the country.

    The prefix of the country is required in the EU and optional elsewhere.

    Args:
        country: ISO 3166-1 alpha-2.
    """
    number = compact(vat_id)
    if country in EU_COUNTRIES:
        return number.startswith(prefix_of(country)) and eu_vat.is_valid(number)
    if country == "GB" and number.startswith(_NORTHERN_IRELAND):
        number = number.removeprefix(_NORTHERN_IRELAND)
    module = get_cc_module(country.lower(), "vat")
    if module is None:
        return _OTHER.match(number) is not None
    return module.is_valid(number) or module.is_valid(number.removeprefix(country))
