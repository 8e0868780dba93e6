"""The facts that EN 16931 requires of an invoice document, for both XML syntaxes.

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
from billing.invoicing.document import TRANSFERS, tax_words
from tenants.currencies import DEFAULT_MINOR_DIGITS

_EN_16931 = "urn:cen.eu:en16931:2017"
_XRECHNUNG = f"{_EN_16931}#compliant#urn:xeinkauf.de:kosit:xrechnung_3.0"
_PROCESS = "urn:fdc:peppol.eu:2017:poacc:billing:01:1.0"
EMAIL_SCHEME = "EM"  # scheme of electronic addresses (EAS)
PIECE = "C62"  # unit of UN/ECE recommendation 20
NO_VAT = "O"  # an invoice out of scope must not contain VAT IDs or rates of lines
# UNTDID 1001
_TYPES = {
    **{"invoice": "380", "purchase": "386", "correction": "381", "credit_note": "381", "debit_note": "383"},
    "cancellation": "381",  # no code of EN 16931 means a cancellation: it is a credit note over the whole invoice
}
_COMMERCIAL = "380"
_XRECHNUNG_TYPES = ("380", "381")
# UNTDID 4461
_UNDEFINED_MEANS = "1"
_SEPA_TRANSFER = "58"
_TRANSFER = "30"
_CLEARING = "97"
CREDITED = "Credited to the account."  # payment terms of documents without a due date
_MAX_DIGITS = 2  # decimals of amounts; prices may have more
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class XmlBuilder:
    """A writer of elements with prefixed names, such as cbc:ID."""

    def __init__(self, namespaces: Mapping[str, str]) -> None:
        self._namespaces = namespaces
        for prefix, uri in namespaces.items():
            register_namespace(prefix, uri)

    def root(self, name: str) -> Element:
        return Element(self._name(name))

    def add(self, parent: Element, name: str, text: str | None = None, /, **attributes: str) -> Element:
        """Append an element. Characters that XML does not allow become spaces."""
        child = SubElement(parent, self._name(name), {key: _clean(value) for key, value in attributes.items()})
        child.text = None if text is None else _clean(text)
        return child

    def add_given(self, parent: Element, name: str, text: str) -> None:
        """Append an element if its text is not empty."""
        if text:
            self.add(parent, name, text)

    def encode(self, root: Element) -> bytes:
        written: bytes = tostring(root, encoding="UTF-8", xml_declaration=True)
        return written

    def _name(self, prefixed: str) -> str:
        prefix, _, name = prefixed.partition(":")
        return f"{{{self._namespaces[prefix]}}}{name}"


def _clean(text: str) -> str:
    return _NOT_XML.sub(" ", text)


class Sums(NamedTuple):
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


class EInvoiceLine(NamedTuple):
    """A line of the XML. `base`: the number of pieces that the price is of; None: one."""

    position: str
    name: str
    quantity: str
    price: str
    base: str | None
    amount: str


class PaymentInstructions(NamedTuple):
    """Payment instructions (BG-16)."""

    code: str
    text: str = ""
    iban: str = ""
    bic: str = ""


def is_xrechnung(document: Mapping[str, Any]) -> bool:
    """Return whether the document has a buyer reference and the other facts that XRechnung requires.

    A document without one of them is only an invoice of EN 16931.
    """
    seller, buyer = document["seller"], document["buyer"]
    names = ("contact_name", "contact_phone", "email", "city", "postcode")
    return all(seller.get(name) for name in names) and all(
        buyer.get(name) for name in ("buyer_reference", "email", "city", "postcode")
    )


def has_contact(party: Mapping[str, Any]) -> bool:
    """Return whether the party has a contact (BG-6), which buyers and documents of an earlier format do not have."""
    return "contact_name" in party or "contact_phone" in party


def specification_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return the specification identifier (BT-24) and the business process (BT-23), which may be empty."""
    return (_XRECHNUNG, _PROCESS) if is_xrechnung(document) else (_EN_16931, "")


def type_code(document: Mapping[str, Any]) -> str:
    """Return the type code (BT-3). XRechnung has none for debit notes and prepayments: they are commercial invoices."""
    code = _TYPES[document["invoice_type"]]
    return code if code in _XRECHNUNG_TYPES or not is_xrechnung(document) else _COMMERCIAL


def notes_of(document: Mapping[str, Any]) -> list[str]:
    """Return the notes: the reason of a correction, and the rate of the tax currency, for which there is no field."""
    tax = document.get("tax_currency", {})
    rate = tax_words(tax, document["currency"]) if "rate_on" in tax else ""
    return [note for note in (document["reason"], rate) if note]


def preceding_number(document: Mapping[str, Any]) -> str | None:
    """Return the number of the document that this one corrects, cancels or replaces, if there is one."""
    return document["refers_to"] or document.get("replaces")


def is_credit_note(document: Mapping[str, Any]) -> bool:
    """Return whether the document is a credit note."""
    return type_code(document) == _TYPES["credit_note"]


def tax_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tax, which all lines have."""
    (tax,) = document["taxes"]
    return tax  # type: ignore[no-any-return]


def line_rate(tax: Mapping[str, Any]) -> str:
    """Return the rate of a line or allowance in percent. Empty: there must be none."""
    return "" if tax["category"] == NO_VAT else _percent(tax)


def breakdown_rate(document: Mapping[str, Any]) -> str:
    """Return the rate of the tax breakdown (BT-119) in percent. Empty: a document of an earlier format has none."""
    tax = tax_of(document)
    return line_rate(tax) or ("" if _is_early(document) else _percent(tax))


def _percent(tax: Mapping[str, Any]) -> str:
    return decimal(tax["rate_ppm"], 4, 2)


def exemption_reason(tax: Mapping[str, Any]) -> str:
    """Return why there is no tax. Empty: there is."""
    return "" if tax["category"] in ("S", "Z") else tax["note"] or "Not subject to tax."


def payment_of(document: Mapping[str, Any]) -> PaymentInstructions | None:
    """Return the payment instructions. Documents of an earlier format have them only for transfers."""
    seller = document["seller"]
    is_payable = document["invoice_type"] in TRANSFERS
    if is_payable and "iban" in seller:
        is_sepa = _is_early(document) or document["currency"] == "EUR"
        code = _SEPA_TRANSFER if is_sepa else _TRANSFER
        return PaymentInstructions(code, iban=seller["iban"], bic=seller.get("bic", ""))
    if _is_early(document):
        return None
    if is_credit_note(document):
        return PaymentInstructions(_CLEARING)
    return PaymentInstructions(_UNDEFINED_MEANS, " ".join(seller["payment_details"].split()) if is_payable else "")


def _is_early(document: Mapping[str, Any]) -> bool:
    return bool(document.get("format_version", 1) < 2)


def days_of(document: Mapping[str, Any]) -> tuple[date, date, date]:
    """Return the issue date and the period's first and last day, in the entity's time zone."""
    zone = ZoneInfo(document["period"]["time_zone"])
    start, end = (datetime.fromisoformat(document["period"][name]) for name in ("starts_at", "ends_at"))
    issued = datetime.fromisoformat(document["issued_at"])
    moments = (issued, start, end - timedelta(microseconds=1))
    first, second, third = (moment.astimezone(zone).date() for moment in moments)
    return first, second, third


def _taxed_before(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return lines that deduct prepaid credit whose purchase was taxed. An allowance would be a discount."""
    deducted = [credit for credit in document["credits"] if "taxed_on" in credit]
    empty: dict[str, Any] = {"model": "", "component": "", "nano_per_million": None}
    return [
        {**empty, "position": number, "description": credit["label"], "cents": -credit["cents"]}
        for number, credit in enumerate(deducted, len(document["lines"]) + 1)
    ]


def _all_lines(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*document["lines"], *_taxed_before(document)]


def lines_of_xml(document: Mapping[str, Any]) -> list[EInvoiceLine]:
    """Return the lines of the XML."""
    return [_line(line, document["currency"]) for line in _all_lines(document)]


def _line(line: Mapping[str, Any], currency: str) -> EInvoiceLine:
    name = " ".join(part for part in (line["model"], line["component"], line["description"]) if part)
    amount = format_amount(_round_amount(line["cents"], currency), currency)
    if line["nano_per_million"] is None:
        quantity = "1" if line["cents"] >= 0 else "-1"  # a price must not be negative
        price = decimal_cents(abs(line["cents"]), minor_digits(currency))
        return EInvoiceLine(str(line["position"]), name, quantity, price, None, amount)
    price = decimal(line["nano_per_million"], NANO_DIGITS, 2)
    return EInvoiceLine(str(line["position"]), name, str(line["tokens"]), price, str(TOKENS_A_PRICE), amount)


def allowances_of(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the reasons and amounts of credit that is deducted before tax."""
    currency = document["currency"]
    return [
        (credit["label"], format_amount(_round_amount(credit["cents"], currency), currency))
        for credit in _allowances(document)
    ]


def _allowances(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [credit for credit in document["credits"] if "taxed_on" not in credit]


def sums_of(document: Mapping[str, Any]) -> Sums:
    """Return the amounts of the document."""
    currency, prepaid = document["currency"], document.get("prepaid", 0)
    lines = sum(_round_amount(line["cents"], currency) for line in _all_lines(document))
    allowances = sum(_round_amount(credit["cents"], currency) for credit in _allowances(document))
    tax, paid = _round_amount(tax_of(document)["tax"], currency), _round_amount(prepaid, currency)
    base, due = lines - allowances, _round_amount(document["total"] - prepaid, currency)
    return Sums(lines, allowances, base, tax, base + tax, paid, due - (base + tax - paid), due)


def converted_tax(document: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the tax currency (BT-6) and the tax in it (BT-111). None: it is the currency of the document."""
    if "tax_currency" not in document:
        return None
    converted = document["tax_currency"]
    digits = converted.get("digits", DEFAULT_MINOR_DIGITS)
    tax = half_up(converted["tax"], 10 ** max(0, digits - _MAX_DIGITS))
    return converted["currency"], _decimals(tax, digits)


def _round_amount(cents: int, currency: str) -> int:
    return half_up(cents, 10 ** max(0, minor_digits(currency) - _MAX_DIGITS))


def format_amount(cents: int, currency: str) -> str:
    """Return an amount, with all decimals of its unit."""
    return _decimals(cents, minor_digits(currency))


def _decimals(cents: int, digits: int) -> str:
    return decimal_cents(cents, min(digits, _MAX_DIGITS))
