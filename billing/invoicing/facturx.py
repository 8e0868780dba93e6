"""Invoices as Factur-X: UN/CEFACT Cross Industry Invoice, profile EN 16931 or XRechnung."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any
from xml.etree.ElementTree import Element

from billing.invoicing import einvoice
from billing.invoicing.einvoice import EMAIL_SCHEME, NO_VAT, PIECE, XmlBuilder, format_amount

_XML = XmlBuilder(
    {
        "rsm": "urn:un:unece:uncefact:data:standard:CrossIndustryInvoice:100",
        "ram": "urn:un:unece:uncefact:data:standard:ReusableAggregateBusinessInformationEntity:100",
        "udt": "urn:un:unece:uncefact:data:standard:UnqualifiedDataType:100",
    }
)
_add = _XML.add


def profile_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return the profile's name and the name of the file that is attached to the PDF."""
    return ("XRECHNUNG", "xrechnung.xml") if einvoice.is_xrechnung(document) else ("EN 16931", "factur-x.xml")


def xml(document: Mapping[str, Any]) -> bytes:
    """Return the document of `billing.invoicing.document` as Factur-X XML."""
    root = _XML.root("rsm:CrossIndustryInvoice")
    _context(_add(root, "rsm:ExchangedDocumentContext"), document)
    _header(_add(root, "rsm:ExchangedDocument"), document)
    trade = _add(root, "rsm:SupplyChainTradeTransaction")
    tax = einvoice.tax_of(document)
    for line in einvoice.lines_of_xml(document):
        _line(_add(trade, "ram:IncludedSupplyChainTradeLineItem"), line, tax)
    _agreement(_add(trade, "ram:ApplicableHeaderTradeAgreement"), document, tax)
    delivered = _add(_add(trade, "ram:ApplicableHeaderTradeDelivery"), "ram:ActualDeliverySupplyChainEvent")
    _date(delivered, "ram:OccurrenceDateTime", einvoice.days_of(document)[2])
    _settlement(_add(trade, "ram:ApplicableHeaderTradeSettlement"), document, tax)
    return _XML.encode(root)


def _context(parent: Element, document: Mapping[str, Any]) -> None:
    specification, process = einvoice.specification_of(document)
    if process:
        _add(_add(parent, "ram:BusinessProcessSpecifiedDocumentContextParameter"), "ram:ID", process)
    _add(_add(parent, "ram:GuidelineSpecifiedDocumentContextParameter"), "ram:ID", specification)


def _date(parent: Element, name: str, day: date) -> None:
    _add(_add(parent, name), "udt:DateTimeString", f"{day:%Y%m%d}", format="102")


def _header(parent: Element, document: Mapping[str, Any]) -> None:
    _add(parent, "ram:ID", document["number"])
    _add(parent, "ram:TypeCode", einvoice.type_code(document))
    _date(parent, "ram:IssueDateTime", einvoice.days_of(document)[0])
    for note in einvoice.notes_of(document):
        _add(_add(parent, "ram:IncludedNote"), "ram:Content", note)


def _line(parent: Element, line: einvoice.EInvoiceLine, tax: Mapping[str, Any]) -> None:
    _add(_add(parent, "ram:AssociatedDocumentLineDocument"), "ram:LineID", line.position)
    _add(_add(parent, "ram:SpecifiedTradeProduct"), "ram:Name", line.name)
    price = _add(_add(parent, "ram:SpecifiedLineTradeAgreement"), "ram:NetPriceProductTradePrice")
    _add(price, "ram:ChargeAmount", line.price)
    if line.base is not None:
        _add(price, "ram:BasisQuantity", line.base, unitCode=PIECE)
    delivery = _add(parent, "ram:SpecifiedLineTradeDelivery")
    _add(delivery, "ram:BilledQuantity", line.quantity, unitCode=PIECE)
    settlement = _add(parent, "ram:SpecifiedLineTradeSettlement")
    _tax_kind(_add(settlement, "ram:ApplicableTradeTax"), tax)
    total = _add(settlement, "ram:SpecifiedTradeSettlementLineMonetarySummation")
    _add(total, "ram:LineTotalAmount", line.amount)


def _tax_kind(parent: Element, tax: Mapping[str, Any]) -> None:
    _add(parent, "ram:TypeCode", "VAT")
    _add(parent, "ram:CategoryCode", tax["category"])
    _XML.add_given(parent, "ram:RateApplicablePercent", einvoice.line_rate(tax))


def _agreement(parent: Element, document: Mapping[str, Any], tax: Mapping[str, Any]) -> None:
    seller, buyer = document["seller"], document["buyer"]
    with_vat, with_address = tax["category"] != NO_VAT, einvoice.is_xrechnung(document)
    _XML.add_given(parent, "ram:BuyerReference", buyer.get("buyer_reference", ""))
    number = seller["registration"] or seller["name"]  # required, with or without a VAT ID
    _party(_add(parent, "ram:SellerTradeParty"), seller, with_vat=with_vat, with_address=with_address, number=number)
    _party(_add(parent, "ram:BuyerTradeParty"), buyer, with_vat=with_vat, with_address=with_address)
    if buyer.get("po_number"):
        _add(_add(parent, "ram:BuyerOrderReferencedDocument"), "ram:IssuerAssignedID", buyer["po_number"])


def _party(parent: Element, party: Mapping[str, str], *, with_vat: bool, with_address: bool, number: str = "") -> None:
    _XML.add_given(parent, "ram:ID", number)
    _add(parent, "ram:Name", party["name"])
    if einvoice.has_contact(party):
        _contact(_add(parent, "ram:DefinedTradeContact"), party)
    address = _add(parent, "ram:PostalTradeAddress")
    for name, value in (
        ("ram:PostcodeCode", party["postcode"]),
        ("ram:LineOne", party["street"]),
        ("ram:CityName", party["city"]),
        ("ram:CountryID", party["country"]),
        ("ram:CountrySubDivisionName", party["region"]),
    ):
        _XML.add_given(address, name, value)
    if with_address:
        _add(_add(parent, "ram:URIUniversalCommunication"), "ram:URIID", party["email"], schemeID=EMAIL_SCHEME)
    if with_vat and party["vat_id"]:
        _add(_add(parent, "ram:SpecifiedTaxRegistration"), "ram:ID", party["vat_id"].replace(" ", ""), schemeID="VA")


def _contact(parent: Element, party: Mapping[str, str]) -> None:
    _XML.add_given(parent, "ram:PersonName", party.get("contact_name", ""))
    if party.get("contact_phone"):
        _add(_add(parent, "ram:TelephoneUniversalCommunication"), "ram:CompleteNumber", party["contact_phone"])
    if party["email"]:
        _add(_add(parent, "ram:EmailURIUniversalCommunication"), "ram:URIID", party["email"])


def _settlement(parent: Element, document: Mapping[str, Any], tax: Mapping[str, Any]) -> None:
    _, first, last = einvoice.days_of(document)
    sums, currency = einvoice.sums_of(document), document["currency"]
    payment, converted = einvoice.payment_of(document), einvoice.converted_tax(document)
    if payment is not None and payment.iban:
        _add(parent, "ram:PaymentReference", document["number"])
    if converted is not None:
        _add(parent, "ram:TaxCurrencyCode", converted[0])
    _add(parent, "ram:InvoiceCurrencyCode", currency)
    if payment is not None:
        _payment_means(_add(parent, "ram:SpecifiedTradeSettlementPaymentMeans"), payment)
    charged = _add(parent, "ram:ApplicableTradeTax")
    _add(charged, "ram:CalculatedAmount", format_amount(sums.tax, currency))
    _add(charged, "ram:TypeCode", "VAT")
    _XML.add_given(charged, "ram:ExemptionReason", einvoice.exemption_reason(tax))
    _add(charged, "ram:BasisAmount", format_amount(sums.base, currency))
    _add(charged, "ram:CategoryCode", tax["category"])
    _XML.add_given(charged, "ram:RateApplicablePercent", einvoice.breakdown_rate(document))
    period = _add(parent, "ram:BillingSpecifiedPeriod")
    _date(period, "ram:StartDateTime", first)
    _date(period, "ram:EndDateTime", last)
    for reason, amount in einvoice.allowances_of(document):
        _allowance(_add(parent, "ram:SpecifiedTradeAllowanceCharge"), amount, reason, tax)
    terms = _add(parent, "ram:SpecifiedTradePaymentTerms")
    if document["due_on"]:
        _date(terms, "ram:DueDateDateTime", date.fromisoformat(document["due_on"]))
    else:
        _add(terms, "ram:Description", einvoice.CREDITED)
    _summation(_add(parent, "ram:SpecifiedTradeSettlementHeaderMonetarySummation"), document, sums)
    if preceding := einvoice.preceding_number(document):
        _add(_add(parent, "ram:InvoiceReferencedDocument"), "ram:IssuerAssignedID", preceding)


def _payment_means(parent: Element, payment: einvoice.PaymentInstructions) -> None:
    _add(parent, "ram:TypeCode", payment.code)
    _XML.add_given(parent, "ram:Information", payment.text)
    if payment.iban:
        _add(_add(parent, "ram:PayeePartyCreditorFinancialAccount"), "ram:IBANID", payment.iban)
    if payment.bic:
        _add(_add(parent, "ram:PayeeSpecifiedCreditorFinancialInstitution"), "ram:BICID", payment.bic)


def _allowance(parent: Element, amount: str, reason: str, tax: Mapping[str, Any]) -> None:
    _add(_add(parent, "ram:ChargeIndicator"), "udt:Indicator", "false")
    _add(parent, "ram:ActualAmount", amount)
    _add(parent, "ram:Reason", reason)
    _tax_kind(_add(parent, "ram:CategoryTradeTax"), tax)


def _summation(parent: Element, document: Mapping[str, Any], sums: einvoice.Sums) -> None:
    currency = document["currency"]
    for name, cents in (
        ("ram:LineTotalAmount", sums.lines),
        ("ram:AllowanceTotalAmount", sums.allowances),
        ("ram:TaxBasisTotalAmount", sums.base),
    ):
        _add(parent, name, format_amount(cents, currency))
    _add(parent, "ram:TaxTotalAmount", format_amount(sums.tax, currency), currencyID=currency)
    if (converted := einvoice.converted_tax(document)) is not None:
        _add(parent, "ram:TaxTotalAmount", converted[1], currencyID=converted[0])
    if sums.rounding:
        _add(parent, "ram:RoundingAmount", format_amount(sums.rounding, currency))
    _add(parent, "ram:GrandTotalAmount", format_amount(sums.total, currency))
    if sums.prepaid:
        _add(parent, "ram:TotalPrepaidAmount", format_amount(sums.prepaid, currency))
    _add(parent, "ram:DuePayableAmount", format_amount(sums.due, currency))
