"""Validation of VAT IDs, countries and currencies. The numbers are examples of the authorities or of python-stdnum."""

from __future__ import annotations

import pytest

from billing.currencies.iso_codes import COUNTRIES, CURRENCIES, EU_COUNTRIES
from billing.taxes.vat_ids import is_valid


@pytest.mark.parametrize(
    ("country", "vat_id"),
    [
        ("DE", "DE136695976"),
        ("DE", "de 136 695 976"),
        ("IE", "IE0000000W"),
        ("GR", "EL094259216"),
        ("GB", "GB980780684"),
        ("GB", "980 7806 84"),
        ("GB", "XI980780684"),
        ("CH", "CHE-107.787.577 MWST"),
        ("NO", "NO 995 525 828 MVA"),
        ("JP", "7000012050002"),
        ("US", "12-3456789"),
    ],
)
def test_valid_ids(country, vat_id):
    assert is_valid(country, vat_id)


@pytest.mark.parametrize(
    ("country", "vat_id"),
    [
        ("DE", "x"),
        ("DE", ""),
        ("DE", "DE136695977"),  # check digit
        ("DE", "136695976"),  # the EU's numbers have a prefix
        ("FR", "DE136695976"),
        ("GR", "GR094259216"),
        ("CH", "CHE-107.787.578 MWST"),
        ("US", "x"),
        ("US", "12-3456789; DROP TABLE"),
    ],
)
def test_invalid_ids(country, vat_id):
    assert not is_valid(country, vat_id)


def test_the_lists_of_codes():
    assert (len(COUNTRIES), len(EU_COUNTRIES)) == (249, 27)
    assert EU_COUNTRIES < COUNTRIES
    assert {len(code) for code in COUNTRIES} == {2}
    assert {"USD", "EUR", "GBP", "JPY", "CHF"} < CURRENCIES
    assert {len(code) for code in CURRENCIES} == {3}
    assert not {"XXX", "XTS", "XAU"} & CURRENCIES
