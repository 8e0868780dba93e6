"""Invoices as UBL 2.1: an Invoice or a CreditNote, by EN 16931 or XRechnung."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree.ElementTree import Element

from billing.invoicing import einvoice
from billing.invoicing.einvoice import EMAIL_SCHEME, NO_VAT, PIECE, XmlBuilder, format_amount

_UBL = "urn:oasis:names:specification:ubl:schema:xsd"
_XML = XmlBuilder(
    {
        "ubl": f"{_UBL}:Invoice-2",
        "cn": f"{_UBL}:CreditNote-2",
        "cac": f"{_UBL}:CommonAggregateComponents-2",
        "cbc": f"{_UBL}:CommonBasicComponents-2",
    }
)
_add = _XML.add


def xml(document: Mapping[str, Any]) -> bytes:
    """Return the document of `billing.invoicing.document` as UBL."""
    is_note = einvoice.is_credit_note(document)
    root = _XML.root("cn:CreditNote" if is_note else "ubl:Invoice")
    _header(root, document, "cbc:CreditNoteTypeCode" if is_note else "cbc:InvoiceTypeCode")
    _parties(root, document)
    _add(_add(root, "cac:Delivery"), "cbc:ActualDeliveryDate", einvoice.days_of(document)[2].isoformat())
    if (payment := einvoice.payment_of(document)) is not None:
        _payment_means(_add(root, "cac:PaymentMeans"), document, payment)
    if not document["due_on"]:
        _add(_add(root, "cac:PaymentTerms"), "cbc:Note", einvoice.CREDITED)
    _amounts(root, document)
    for line in einvoice.lines_of_xml(document):
        _line(root, line, document, is_note=is_note)
    return _XML.encode(root)


def _header(root: Element, document: Mapping[str, Any], type_name: str) -> None:
    issued, first, last = einvoice.days_of(document)
    specification, process = einvoice.specification_of(document)
    buyer, converted = document["buyer"], einvoice.converted_tax(document)
    _add(root, "cbc:CustomizationID", specification)
    _XML.add_given(root, "cbc:ProfileID", process)
    _add(root, "cbc:ID", document["number"])
    _add(root, "cbc:IssueDate", issued.isoformat())
    _XML.add_given(root, "cbc:DueDate", document["due_on"] or "")
    _add(root, type_name, einvoice.type_code(document))
    for note in einvoice.notes_of(document):
        _add(root, "cbc:Note", note)
    _add(root, "cbc:DocumentCurrencyCode", document["currency"])
    if converted is not None:
        _add(root, "cbc:TaxCurrencyCode", converted[0])
    _XML.add_given(root, "cbc:BuyerReference", buyer.get("buyer_reference", ""))
    period = _add(root, "cac:InvoicePeriod")
    _add(period, "cbc:StartDate", first.isoformat())
    _add(period, "cbc:EndDate", last.isoformat())
    if buyer.get("po_number"):
        _add(_add(root, "cac:OrderReference"), "cbc:ID", buyer["po_number"])
    if preceding := einvoice.preceding_number(document):
        reference = _add(_add(root, "cac:BillingReference"), "cac:InvoiceDocumentReference")
        _add(reference, "cbc:ID", preceding)


def _parties(root: Element, document: Mapping[str, Any]) -> None:
    seller, buyer = document["seller"], document["buyer"]
    with_vat = einvoice.tax_of(document)["category"] != NO_VAT
    with_address = einvoice.is_xrechnung(document)
    number = seller["registration"] or seller["name"]  # required, with or without a VAT ID
    for name, party, identifier in (
        ("cac:AccountingSupplierParty", seller, number),
        ("cac:AccountingCustomerParty", buyer, ""),
    ):
        parent = _add(_add(root, name), "cac:Party")
        _party(parent, party, with_vat=with_vat, with_address=with_address, number=identifier)


def _party(parent: Element, party: Mapping[str, str], *, with_vat: bool, with_address: bool, number: str) -> None:
    if with_address:
        _add(parent, "cbc:EndpointID", party["email"], schemeID=EMAIL_SCHEME)
    if number:
        _add(_add(parent, "cac:PartyIdentification"), "cbc:ID", number)
    address = _add(parent, "cac:PostalAddress")
    for name, value in (
        ("cbc:StreetName", party["street"]),
        ("cbc:CityName", party["city"]),
        ("cbc:PostalZone", party["postcode"]),
        ("cbc:CountrySubentity", party["region"]),
    ):
        _XML.add_given(address, name, value)
    _add(_add(address, "cac:Country"), "cbc:IdentificationCode", party["country"])
    if with_vat and party["vat_id"]:
        registration = _add(parent, "cac:PartyTaxScheme")
        _add(registration, "cbc:CompanyID", party["vat_id"].replace(" ", ""))
        _tax_scheme(registration)
    _add(_add(parent, "cac:PartyLegalEntity"), "cbc:RegistrationName", party["name"])
    if einvoice.has_contact(party):
        contact = _add(parent, "cac:Contact")
        _XML.add_given(contact, "cbc:Name", party.get("contact_name", ""))
        _XML.add_given(contact, "cbc:Telephone", party.get("contact_phone", ""))
        _XML.add_given(contact, "cbc:ElectronicMail", party["email"])


def _tax_scheme(parent: Element) -> None:
    _add(_add(parent, "cac:TaxScheme"), "cbc:ID", "VAT")


def _payment_means(parent: Element, document: Mapping[str, Any], payment: einvoice.PaymentInstructions) -> None:
    _add(parent, "cbc:PaymentMeansCode", payment.code, **({"name": payment.text} if payment.text else {}))
    if payment.iban:
        _add(parent, "cbc:PaymentID", document["number"])
        account = _add(parent, "cac:PayeeFinancialAccount")
        _add(account, "cbc:ID", payment.iban)
        if payment.bic:
            _add(_add(account, "cac:FinancialInstitutionBranch"), "cbc:ID", payment.bic)


def _tax_kind(parent: Element, name: str, category: str, rate: str, reason: str = "") -> None:
    kind = _add(parent, name)
    _add(kind, "cbc:ID", category)
    _XML.add_given(kind, "cbc:Percent", rate)
    _XML.add_given(kind, "cbc:TaxExemptionReason", reason)
    _tax_scheme(kind)


def _amounts(root: Element, document: Mapping[str, Any]) -> None:
    currency, tax, sums = document["currency"], einvoice.tax_of(document), einvoice.sums_of(document)

    def add_amount(parent: Element, name: str, cents: int) -> None:
        _add(parent, name, format_amount(cents, currency), currencyID=currency)

    for reason, amount in einvoice.allowances_of(document):
        allowance = _add(root, "cac:AllowanceCharge")
        _add(allowance, "cbc:ChargeIndicator", "false")
        _add(allowance, "cbc:AllowanceChargeReason", reason)
        _add(allowance, "cbc:Amount", amount, currencyID=currency)
        _tax_kind(allowance, "cac:TaxCategory", tax["category"], einvoice.line_rate(tax))
    charged = _add(root, "cac:TaxTotal")
    add_amount(charged, "cbc:TaxAmount", sums.tax)
    breakdown = _add(charged, "cac:TaxSubtotal")
    add_amount(breakdown, "cbc:TaxableAmount", sums.base)
    add_amount(breakdown, "cbc:TaxAmount", sums.tax)
    rate, why = einvoice.breakdown_rate(document), einvoice.exemption_reason(tax)
    _tax_kind(breakdown, "cac:TaxCategory", tax["category"], rate, why)
    if (converted := einvoice.converted_tax(document)) is not None:
        _add(_add(root, "cac:TaxTotal"), "cbc:TaxAmount", converted[1], currencyID=converted[0])
    total = _add(root, "cac:LegalMonetaryTotal")
    for name, cents in (
        ("cbc:LineExtensionAmount", sums.lines),
        ("cbc:TaxExclusiveAmount", sums.base),
        ("cbc:TaxInclusiveAmount", sums.total),
        ("cbc:AllowanceTotalAmount", sums.allowances),
    ):
        add_amount(total, name, cents)
    if sums.prepaid:
        add_amount(total, "cbc:PrepaidAmount", sums.prepaid)
    if sums.rounding:
        add_amount(total, "cbc:PayableRoundingAmount", sums.rounding)
    add_amount(total, "cbc:PayableAmount", sums.due)


def _line(root: Element, line: einvoice.EInvoiceLine, document: Mapping[str, Any], *, is_note: bool) -> None:
    currency, tax = document["currency"], einvoice.tax_of(document)
    parent = _add(root, "cac:CreditNoteLine" if is_note else "cac:InvoiceLine")
    _add(parent, "cbc:ID", line.position)
    _add(parent, "cbc:CreditedQuantity" if is_note else "cbc:InvoicedQuantity", line.quantity, unitCode=PIECE)
    _add(parent, "cbc:LineExtensionAmount", line.amount, currencyID=currency)
    item = _add(parent, "cac:Item")
    _add(item, "cbc:Name", line.name)
    _tax_kind(item, "cac:ClassifiedTaxCategory", tax["category"], einvoice.line_rate(tax))
    price = _add(parent, "cac:Price")
    _add(price, "cbc:PriceAmount", line.price, currencyID=currency)
    if line.base is not None:
        _add(price, "cbc:BaseQuantity", line.base, unitCode=PIECE)
