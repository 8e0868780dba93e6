"""The XML of invoices: CII and UBL from the same document, by the rules of CEN and KoSIT."""

from __future__ import annotations

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import facturx as checker
import pikepdf
import pytest
from lxml import etree

from billing.invoicing import einvoice, facturx, pdf, ubl
from billing.invoicing.document import FORMAT_VERSION, in_words
from tests.support.billing.invoice_forms import failed_rules, failed_ubl_rules, failed_xrechnung_rules

DATA = Path("tests/data/e_invoices")
NAMES = sorted(path.stem for path in DATA.glob("*.json"))
CATEGORIES = ("S", "AE", "Z", "E", "G", "O")
XRECHNUNG = b"urn:cen.eu:en16931:2017#compliant#urn:xeinkauf.de:kosit:xrechnung_3.0"
IBAN = {"iban": "NL91ABNA0417164300", "bic": "ABNANL2A"}


def early(name: str) -> dict[str, Any]:
    """Return a document of the first format version."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def current(name: str, **changes: Any) -> dict[str, Any]:
    return {**early(name), "format_version": FORMAT_VERSION, **changes}


def xrechnung(name: str, **changes: Any) -> dict[str, Any]:
    """Return a document with the facts that XRechnung requires."""
    document = current(name, **changes)
    document["seller"] |= {"contact_name": "Ann Berg", "contact_phone": "+31 20 1234567"}
    document["buyer"] |= {"buyer_reference": "04011000-12345-34", "email": "bills@acme.example"}
    return document


def documents(name: str) -> list[dict[str, Any]]:
    """Return a document as each type with its tax, with and without a buyer reference."""
    if early(name)["invoice_type"] == "credit_note":
        changes: list[dict[str, Any]] = [{"invoice_type": "credit_note"}, {"invoice_type": "correction"}]
    else:
        charged = {"invoice_type": "debit_note", "refers_to": "INV-2026-000009", "reason": "Support"}
        changes = [{"invoice_type": "invoice"}, {"invoice_type": "purchase"}, charged]
    return [make(name, **change) for make in (current, xrechnung) for change in changes]


def facts(xml: bytes) -> set[str]:
    """Return the texts of elements and of the text of payment instructions, which UBL has as an attribute."""
    root = etree.fromstring(xml)
    texts = [str(text) for text in (*root.itertext(), *root.xpath("//@name"))]
    return {re.sub(r"^(\d{4})-(\d\d)-(\d\d)$", r"\1\2\3", text) for text in texts}


@pytest.mark.parametrize("name", NAMES)
def test_the_xml_of_earlier_documents_is_equal_to_the_byte(name):
    assert facturx.xml(early(name)) == (DATA / f"{name}.xml").read_bytes()
    assert in_words(early(name))["bank"] == ""
    assert failed_ubl_rules(ubl.xml(early(name))) == []


@pytest.mark.parametrize(
    ("name", "category"),
    [*((name, category) for name in ("standard", "note") for category in CATEGORIES), ("dinar", "S"), ("scope", "O")],
)
def test_every_document_is_valid(name, category):
    for document in documents(name):
        (tax,) = document["taxes"]
        tax["category"] = category
        if category != "S":
            tax |= {"rate_ppm": 0, "tax": 0}
            document["total"] = document["taxable"]
            document["prepaid"] = min(document.get("prepaid", 0), document["total"])
            document.pop("tax_currency", None)
        elif not tax["rate_ppm"]:
            tax |= {"rate_ppm": 190_000, "tax": document["taxable"] * 19 // 100}
            document["total"] = document["taxable"] + tax["tax"]
        cii, other = facturx.xml(document), ubl.xml(document)
        assert checker.xml_check_xsd(cii, flavor="factur-x", level="en16931")
        assert (failed_rules(cii), failed_ubl_rules(other)) == ([], [])
        is_xrechnung = "buyer_reference" in document["buyer"]
        assert (XRECHNUNG in cii, XRECHNUNG in other) == (is_xrechnung, is_xrechnung)
        if is_xrechnung:
            assert (failed_xrechnung_rules(cii), failed_xrechnung_rules(other)) == ([], [])


@pytest.mark.parametrize("name", NAMES)
def test_both_syntaxes_have_the_same_facts(name):
    """Each text of one of them is in the other one, apart from the formats of dates."""
    for document in documents(name):
        assert facts(facturx.xml(document)) == facts(ubl.xml(document))


@pytest.mark.parametrize(
    ("party", "fact"),
    [
        *(("seller", fact) for fact in ("contact_name", "contact_phone", "email", "city", "postcode")),
        *(("buyer", fact) for fact in ("buyer_reference", "email", "city", "postcode")),
    ],
)
def test_a_document_without_a_required_fact_is_no_xrechnung(party, fact):
    document = xrechnung("standard")
    assert einvoice.is_xrechnung(document)
    document[party][fact] = ""
    assert not einvoice.is_xrechnung(document)
    cii, other = facturx.xml(document), ubl.xml(document)
    assert XRECHNUNG not in cii
    assert XRECHNUNG not in other
    assert (failed_rules(cii), failed_ubl_rules(other)) == ([], [])


@pytest.mark.parametrize("rule", ["BR-DE-1]", "BR-DE-2]", "BR-DE-14]", "BR-DE-15]"])
def test_the_rules_find_what_is_missing(rule):
    """The schematron is evaluated: without a fact, its rule fails."""
    xml = {
        "BR-DE-1]": (r"<ram:SpecifiedTradeSettlementPaymentMeans>.*</ram:SpecifiedTradeSettlementPaymentMeans>", ""),
        "BR-DE-2]": (r"<ram:DefinedTradeContact>.*</ram:DefinedTradeContact>", ""),
        "BR-DE-14]": (r"(.*)<ram:RateApplicablePercent>[^<]*</ram:RateApplicablePercent>", r"\1"),
        "BR-DE-15]": (r"<ram:BuyerReference>.*</ram:BuyerReference>", ""),
    }
    pattern, instead = xml[rule]
    made = re.sub(pattern, instead, facturx.xml(xrechnung("scope")).decode(), count=1)
    assert any(rule in failed for failed in failed_xrechnung_rules(made.encode()))


@pytest.mark.parametrize(
    ("name", "kind", "account", "code"),
    [
        *(("standard", "invoice", IBAN, "30"), ("standard", "debit_note", IBAN, "30")),
        *(("standard", "invoice", {}, "1"), ("standard", "purchase", IBAN, "1")),
        *(("note", "credit_note", IBAN, "97"), ("note", "correction", {}, "97")),
    ],
)
def test_payment_instructions(name, kind, account, code):
    document = current(name, invoice_type=kind)
    document["seller"] = {key: value for key, value in document["seller"].items() if key not in IBAN} | account
    payment = einvoice.payment_of(document)
    assert payment is not None
    assert payment.code == code
    assert (payment.iban, payment.bic) == ((*IBAN.values(),) if code == "30" else ("", ""))
    assert payment.text == ("Pay now" if kind == "invoice" and not account else "")
    shown = in_words(document)["bank"]
    assert ("IBAN NL91 ABNA 0417 1643 00, BIC ABNANL2A" in shown) == (code == "30")


def test_a_transfer_in_euros_is_a_sepa_transfer():
    document = current("standard", currency="EUR")
    document["seller"] |= IBAN
    payment = einvoice.payment_of(document)
    assert payment is not None
    assert payment.code == "58"


def test_a_document_out_of_scope_has_the_rate_0_in_its_breakdown_only():
    for document, count in ((early("scope"), 0), (current("scope"), 1)):
        assert facturx.xml(document).count(b"RateApplicablePercent>0.00<") == count
        assert ubl.xml(document).count(b"Percent>0.00<") == count


def test_the_pdf_of_an_xrechnung_names_its_profile():
    for document, name, level in (
        (current("standard"), "factur-x.xml", "EN 16931"),
        (xrechnung("standard"), "xrechnung.xml", "XRECHNUNG"),
    ):
        made = pdf.render_pdf(document)
        with pikepdf.open(io.BytesIO(made)) as file:
            assert list(file.attachments) == [name]
            assert file.attachments[name].get_file().read_bytes() == facturx.xml(document)
            xmp = file.Root.Metadata.read_bytes().decode()
        assert f"<fx:ConformanceLevel>{level}</fx:ConformanceLevel>" in xmp
        assert f"<fx:DocumentFileName>{name}</fx:DocumentFileName>" in xmp
        assert checker.get_xml_from_pdf(made, check_xsd=False)[0] == name


def test_the_page_has_the_bank_account():
    without = current("standard")
    account = copy.deepcopy(without)
    for key in IBAN:
        del without["seller"][key]
    assert in_words(account)["bank"].startswith("Bank account: IBAN NL91 ABNA 0417 1643 00, BIC ABNANL2A. Reference: ")
    assert len(pdf.render_pdf(account)) > len(pdf.render_pdf(without))


def test_characters_that_xml_does_not_allow_become_spaces():
    document = current("standard")
    document["buyer"]["name"] = "Acme\x0bGmbH\ufffe"
    for made in (facturx.xml(document), ubl.xml(document)):
        assert "Acme GmbH " in "".join(etree.fromstring(made).itertext())
