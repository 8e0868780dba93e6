"""Invoices as Factur-X: UN/CEFACT Cross Industry Invoice, profile EN 16931.

EN 16931 allows two decimals in amounts. In a currency with three, such as KWD, amounts are rounded to two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, register_namespace, tostring
from zoneinfo import ZoneInfo

from billing.currencies.amounts import NANO_DIGITS, TOKENS_A_PRICE, decimal, decimal_cents, half_up, minor_digits
from billing.invoicing.document import tax_words
from tenants.currencies import DEFAULT_MINOR_DIGITS

PROFILE = "EN 16931"
_GUIDELINE = "urn:cen.eu:en16931:2017"
_NAMESPACES = {
    "rsm": "urn:un:unece:uncefact:data:standard:CrossIndustryInvoice:100",
    "ram": "urn:un:unece:uncefact:data:standard:ReusableAggregateBusinessInformationEntity:100",
    "udt": "urn:un:unece:uncefact:data:standard:UnqualifiedDataType:100",
}
for _prefix, _uri in _NAMESPACES.items():
    register_namespace(_prefix, _uri)
# UNTDID 1001
_TYPES = {
    **{"invoice": "380", "purchase": "386", "correction": "381", "credit_note": "381", "debit_note": "383"},
    "cancellation": "381",  # no code of EN 16931 means a cancellation: it is a credit note over the whole invoice
}
_MAX_DIGITS = 2  # decimals of amounts; prices may have more
_SEPA_TRANSFER = "58"  # UNTDID 4461
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NO_VAT = "O"  # an invoice out of scope must not contain VAT IDs or rates


def xml(document: Mapping[str, Any]) -> bytes:
    """Return the document of `billing.invoicing.document` as Factur-X XML."""
    root = Element(_name("rsm:CrossIndustryInvoice"))
    context = _add(_add(root, "rsm:ExchangedDocumentContext"), "ram:GuidelineSpecifiedDocumentContextParameter")
    _add(context, "ram:ID", _GUIDELINE)
    _header(_add(root, "rsm:ExchangedDocument"), document)
    trade = _add(root, "rsm:SupplyChainTradeTransaction")
    (tax,) = document["taxes"]  # all lines have the same tax
    for line in [*document["lines"], *_taxed_before(document)]:
        _line(_add(trade, "ram:IncludedSupplyChainTradeLineItem"), line, tax, document["currency"])
    _agreement(_add(trade, "ram:ApplicableHeaderTradeAgreement"), document, tax)
    delivered = _add(_add(trade, "ram:ApplicableHeaderTradeDelivery"), "ram:ActualDeliverySupplyChainEvent")
    _date(delivered, "ram:OccurrenceDateTime", _days(document)[2])
    _settlement(_add(trade, "ram:ApplicableHeaderTradeSettlement"), document, tax)
    written: bytes = tostring(root, encoding="UTF-8", xml_declaration=True)
    return written


def _taxed_before(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return lines that deduct prepaid credit whose purchase was taxed. An allowance would be a discount."""
    deducted = [credit for credit in document["credits"] if "taxed_on" in credit]
    empty: dict[str, Any] = {"model": "", "component": "", "nano_per_million": None}
    return [
        {**empty, "position": number, "description": credit["label"], "cents": -credit["cents"]}
        for number, credit in enumerate(deducted, len(document["lines"]) + 1)
    ]


def _name(prefixed: str) -> str:
    prefix, _, name = prefixed.partition(":")
    return f"{{{_NAMESPACES[prefix]}}}{name}"


def _add(parent: Element, name: str, text: str | None = None, **attributes: str) -> Element:
    child = SubElement(parent, _name(name), attributes)
    child.text = None if text is None else _NOT_XML.sub(" ", text)
    return child


def _date(parent: Element, name: str, day: date) -> None:
    _add(_add(parent, name), "udt:DateTimeString", f"{day:%Y%m%d}", format="102")


def _days(document: Mapping[str, Any]) -> tuple[date, date, date]:
    """Return the issue date and the period's first and last day, in the entity's time zone."""
    zone = ZoneInfo(document["period"]["time_zone"])
    start, end = (datetime.fromisoformat(document["period"][name]) for name in ("starts_at", "ends_at"))
    issued = datetime.fromisoformat(document["issued_at"])
    moments = (issued, start, end - timedelta(microseconds=1))
    first, second, third = (moment.astimezone(zone).date() for moment in moments)
    return first, second, third


def _header(parent: Element, document: Mapping[str, Any]) -> None:
    _add(parent, "ram:ID", document["number"])
    _add(parent, "ram:TypeCode", _TYPES[document["invoice_type"]])
    _date(parent, "ram:IssueDateTime", _days(document)[0])
    if document["reason"]:
        _add(_add(parent, "ram:IncludedNote"), "ram:Content", document["reason"])
    tax = document.get("tax_currency", {})
    if "rate_on" in tax:  # the profile has no field of the rate
        _add(_add(parent, "ram:IncludedNote"), "ram:Content", tax_words(tax, document["currency"]))


class _Sums(NamedTuple):
    """The amounts of the document in the unit of the XML, computed from its rounded parts as EN 16931 requires.

    `rounding`: what they differ from the rounded amount due.
    """

    lines: int
    allowances: int
    base: int
    tax: int
    total: int
    prepaid: int
    rounding: int
    due: int


def _sums_of(document: Mapping[str, Any], tax: Mapping[str, Any]) -> _Sums:
    currency, prepaid = document["currency"], document.get("prepaid", 0)
    lines = sum(_round_amount(line["cents"], currency) for line in [*document["lines"], *_taxed_before(document)])
    allowances = sum(_round_amount(credit["cents"], currency) for credit in _allowances(document))
    base, charged, paid = lines - allowances, _round_amount(tax["tax"], currency), _round_amount(prepaid, currency)
    due = _round_amount(document["total"] - prepaid, currency)
    return _Sums(lines, allowances, base, charged, base + charged, paid, due - (base + charged - paid), due)


def _round_amount(cents: int, currency: str) -> int:
    return half_up(cents, 10 ** max(0, minor_digits(currency) - _MAX_DIGITS))


def _amount(cents: int, digits: int) -> str:
    """Return an amount, with all decimals of its unit."""
    return decimal_cents(cents, min(digits, _MAX_DIGITS))


def _line(parent: Element, line: Mapping[str, Any], tax: Mapping[str, Any], currency: str) -> None:
    _add(_add(parent, "ram:AssociatedDocumentLineDocument"), "ram:LineID", str(line["position"]))
    product = _add(parent, "ram:SpecifiedTradeProduct")
    _add(
        product, "ram:Name", " ".join(part for part in (line["model"], line["component"], line["description"]) if part)
    )
    price = _add(_add(parent, "ram:SpecifiedLineTradeAgreement"), "ram:NetPriceProductTradePrice")
    if line["nano_per_million"] is None:
        quantity = 1 if line["cents"] >= 0 else -1  # a price must not be negative
        _add(price, "ram:ChargeAmount", decimal_cents(abs(line["cents"]), minor_digits(currency)))
    else:
        quantity = line["tokens"]
        _add(price, "ram:ChargeAmount", decimal(line["nano_per_million"], NANO_DIGITS, 2))
        _add(price, "ram:BasisQuantity", str(TOKENS_A_PRICE), unitCode="C62")
    delivery = _add(parent, "ram:SpecifiedLineTradeDelivery")
    _add(delivery, "ram:BilledQuantity", str(quantity), unitCode="C62")
    settlement = _add(parent, "ram:SpecifiedLineTradeSettlement")
    _tax_kind(_add(settlement, "ram:ApplicableTradeTax"), tax)
    total = _add(settlement, "ram:SpecifiedTradeSettlementLineMonetarySummation")
    _add(total, "ram:LineTotalAmount", _amount(_round_amount(line["cents"], currency), minor_digits(currency)))


def _tax_kind(parent: Element, tax: Mapping[str, Any]) -> None:
    _add(parent, "ram:TypeCode", "VAT")
    _add(parent, "ram:CategoryCode", tax["category"])
    if tax["category"] != _NO_VAT:
        _add(parent, "ram:RateApplicablePercent", decimal(tax["rate_ppm"], 4, 2))


def _agreement(parent: Element, document: Mapping[str, Any], tax: Mapping[str, Any]) -> None:
    seller, buyer = document["seller"], document["buyer"]
    with_vat = tax["category"] != _NO_VAT
    number = seller["registration"] or seller["name"]  # required, with or without a VAT ID
    _party(_add(parent, "ram:SellerTradeParty"), seller, with_vat=with_vat, number=number)
    _party(_add(parent, "ram:BuyerTradeParty"), buyer, with_vat=with_vat)
    if buyer.get("po_number"):
        _add(_add(parent, "ram:BuyerOrderReferencedDocument"), "ram:IssuerAssignedID", buyer["po_number"])


def _party(parent: Element, party: Mapping[str, str], *, with_vat: bool, number: str = "") -> None:
    if number:
        _add(parent, "ram:ID", number)
    _add(parent, "ram:Name", party["name"])
    address = _add(parent, "ram:PostalTradeAddress")
    for name, value in (
        ("ram:PostcodeCode", party["postcode"]),
        ("ram:LineOne", party["street"]),
        ("ram:CityName", party["city"]),
        ("ram:CountryID", party["country"]),
        ("ram:CountrySubDivisionName", party["region"]),
    ):
        if value:
            _add(address, name, value)
    if with_vat and party["vat_id"]:
        _add(_add(parent, "ram:SpecifiedTaxRegistration"), "ram:ID", party["vat_id"].replace(" ", ""), schemeID="VA")


def _settlement(parent: Element, document: Mapping[str, Any], tax: Mapping[str, Any]) -> None:
    _, first, last = _days(document)
    sums, digits = _sums_of(document, tax), minor_digits(document["currency"])
    is_payable = document["invoice_type"] in ("invoice", "debit_note") and "iban" in document["seller"]
    if is_payable:
        _add(parent, "ram:PaymentReference", document["number"])
    if "tax_currency" in document:
        _add(parent, "ram:TaxCurrencyCode", document["tax_currency"]["currency"])
    _add(parent, "ram:InvoiceCurrencyCode", document["currency"])
    if is_payable:
        _payment_means(_add(parent, "ram:SpecifiedTradeSettlementPaymentMeans"), document["seller"])
    charged = _add(parent, "ram:ApplicableTradeTax")
    _add(charged, "ram:CalculatedAmount", _amount(sums.tax, digits))
    _add(charged, "ram:TypeCode", "VAT")
    if tax["category"] not in ("S", "Z"):
        _add(charged, "ram:ExemptionReason", tax["note"] or "Not subject to tax.")
    _add(charged, "ram:BasisAmount", _amount(sums.base, digits))
    _add(charged, "ram:CategoryCode", tax["category"])
    if tax["category"] != _NO_VAT:
        _add(charged, "ram:RateApplicablePercent", decimal(tax["rate_ppm"], 4, 2))
    period = _add(parent, "ram:BillingSpecifiedPeriod")
    _date(period, "ram:StartDateTime", first)
    _date(period, "ram:EndDateTime", last)
    for credit in _allowances(document):
        amount = _amount(_round_amount(credit["cents"], document["currency"]), digits)
        _allowance(_add(parent, "ram:SpecifiedTradeAllowanceCharge"), amount, credit["label"], tax)
    terms = _add(parent, "ram:SpecifiedTradePaymentTerms")
    if document["due_on"]:
        _date(terms, "ram:DueDateDateTime", date.fromisoformat(document["due_on"]))
    else:
        _add(terms, "ram:Description", "Credited to the account.")
    _summation(_add(parent, "ram:SpecifiedTradeSettlementHeaderMonetarySummation"), document, sums)
    if preceding := document["refers_to"] or document.get("replaces"):
        _add(_add(parent, "ram:InvoiceReferencedDocument"), "ram:IssuerAssignedID", preceding)


def _payment_means(parent: Element, seller: Mapping[str, str]) -> None:
    _add(parent, "ram:TypeCode", _SEPA_TRANSFER)
    _add(_add(parent, "ram:PayeePartyCreditorFinancialAccount"), "ram:IBANID", seller["iban"])
    if "bic" in seller:
        _add(_add(parent, "ram:PayeeSpecifiedCreditorFinancialInstitution"), "ram:BICID", seller["bic"])


def _allowances(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [credit for credit in document["credits"] if "taxed_on" not in credit]


def _allowance(parent: Element, amount: str, reason: str, tax: Mapping[str, Any]) -> None:
    _add(_add(parent, "ram:ChargeIndicator"), "udt:Indicator", "false")
    _add(parent, "ram:ActualAmount", amount)
    _add(parent, "ram:Reason", reason)
    _tax_kind(_add(parent, "ram:CategoryTradeTax"), tax)


def _summation(parent: Element, document: Mapping[str, Any], sums: _Sums) -> None:
    digits = minor_digits(document["currency"])
    for name, cents in (
        ("ram:LineTotalAmount", sums.lines),
        ("ram:AllowanceTotalAmount", sums.allowances),
        ("ram:TaxBasisTotalAmount", sums.base),
    ):
        _add(parent, name, _amount(cents, digits))
    _add(parent, "ram:TaxTotalAmount", _amount(sums.tax, digits), currencyID=document["currency"])
    if "tax_currency" in document:
        converted = document["tax_currency"]
        tax_digits = converted.get("digits", DEFAULT_MINOR_DIGITS)
        tax = half_up(converted["tax"], 10 ** max(0, tax_digits - _MAX_DIGITS))
        _add(parent, "ram:TaxTotalAmount", _amount(tax, tax_digits), currencyID=converted["currency"])
    if sums.rounding:
        _add(parent, "ram:RoundingAmount", _amount(sums.rounding, digits))
    _add(parent, "ram:GrandTotalAmount", _amount(sums.total, digits))
    if sums.prepaid:
        _add(parent, "ram:TotalPrepaidAmount", _amount(sums.prepaid, digits))
    _add(parent, "ram:DuePayableAmount", _amount(sums.due, digits))
