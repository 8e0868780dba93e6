"""The invoice document: its data as reproducible JSON, and its texts for HTML and PDF."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from billing.currencies.amounts import (
    FINE_RATE_DIGITS,
    NANO_DIGITS,
    RATE_DIGITS,
    cents,
    decimal,
    decimal_cents,
    dollars,
    half_up,
    minor_digits,
    symbol,
)
from billing.invoicing.usage_shares import sum_shares
from billing.models import CHARGES, Invoice, InvoiceLine
from billing.pricing.currencies import CrossRate
from billing.rates.pricing import Component
from tenants.currencies import DEFAULT_MINOR_DIGITS

FORMAT_VERSION = 2  # version of the texts and XML of new documents; a final document keeps its own
_RATE_UNITS = {RATE_DIGITS: "micro", FINE_RATE_DIGITS: "pico"}  # by the decimals of exchange rates
TITLES = {
    "invoice": "Invoice",
    "purchase": "Invoice",
    "correction": "Credit note",
    "credit_note": "Credit note",
    "debit_note": "Debit note",
    "cancellation": "Cancellation",
}
TRANSFERS = ("invoice", "debit_note")  # documents that are paid by transfer
_SECTIONS = {"project": "Usage by project", "cost_center": "Usage by cost center"}
_NO_COST_CENTER = "No cost center"
_LINE = (
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
        "price_id",
    ),
    *("nano_per_million", "usage_month", "events", "tokens", "cents"),
)


def describe_invoice(invoice: Invoice, lines: Iterable[InvoiceLine]) -> dict[str, Any]:
    """Return the data of a final invoice. Cents are numbers; femto-USD, which may be large, are texts."""
    period, refers_to = invoice.period, invoice.refers_to
    return {
        "number": invoice.number,
        "invoice_type": invoice.invoice_type,
        "revision": invoice.revision,
        "issued_at": _instant(invoice.issued_at),
        "due_on": invoice.due_on and invoice.due_on.isoformat(),
        "currency": invoice.currency,
        "period": {
            "label": period.label,
            "starts_at": _instant(period.starts_at),
            "ends_at": _instant(period.ends_at),
            "time_zone": invoice.entity.time_zone,
        },
        "refers_to": refers_to and refers_to.number,
        "reason": invoice.reason,
        "seller": invoice.seller,
        "buyer": invoice.buyer,
        "lines": [_line(line) for line in lines],
        "events": invoice.events,
        "subtotal": invoice.subtotal,
        "credits": invoice.credits,
        "taxable": invoice.taxable,
        "taxes": invoice.taxes,
        "total": invoice.total,
        "rounding_femto": str(int(invoice.rounding_femto)),
        "saved_femto": str(int(invoice.saved_femto)),
        "display": _display(invoice),
        **_describe_replaced(invoice),
        **_describe_format(invoice),
        **_describe_payment(invoice),
        **_tax_currency(invoice),
    }


def _describe_replaced(invoice: Invoice) -> dict[str, Any]:
    """Return the number of the cancelled invoice that the document replaces, if it replaces one."""
    return {} if invoice.replaces is None else {"replaces": invoice.replaces.number}


def _describe_format(invoice: Invoice) -> dict[str, Any]:
    """Return the version of the format. Documents of the first version have no such field."""
    return {"format_version": invoice.format_version} if invoice.format_version > 1 else {}


def _describe_payment(invoice: Invoice) -> dict[str, Any]:
    """Return what prepaid credit paid, if it paid something. Documents of before have no such field."""
    return {"prepaid": invoice.prepaid} if invoice.prepaid else {}


def _tax_currency(invoice: Invoice) -> dict[str, Any]:
    """Return the tax in the seller's tax currency, if it is not the currency of the document."""
    if invoice.tax_rate is None:
        return {}
    tax = invoice.converted_tax
    if tax is None:  # issued by an earlier release
        tax = half_up(sum(item["tax"] for item in invoice.taxes) * invoice.tax_rate, 10**invoice.rate_digits)
    shown = {"currency": invoice.tax_currency, _rate_name(invoice): invoice.tax_rate, "tax": tax}
    return {"tax_currency": shown | _digits(invoice.tax_digits) | _rate_day(invoice.tax_rate_on)}


def _digits(digits: int) -> dict[str, int]:
    """Return the decimals of a converted amount, if they are not two. Documents of before have no such field."""
    return {} if digits == DEFAULT_MINOR_DIGITS else {"digits": digits}


def _rate_day(day: date | None) -> dict[str, str]:
    """Return the day of an exchange rate. Documents of before have no such field."""
    return {} if day is None else {"rate_on": day.isoformat()}


def _rate_name(invoice: Invoice) -> str:
    """Return the name of an exchange rate, which has its unit and the document's currency."""
    return f"{_RATE_UNITS[invoice.rate_digits]}_per_{invoice.currency.lower()}"


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Encode as JSON. The same data give the same bytes."""
    return msgspec.json.encode(document, order="sorted")


def _line(line: InvoiceLine) -> dict[str, Any]:
    exact = {"femto": str(int(line.femto)), "first_at": _instant(line.first_at), "last_at": _instant(line.last_at)}
    shares = {} if line.shares is None else {"shares": line.shares}  # documents of before have no such field
    return {name: getattr(line, name) for name in _LINE} | exact | shares


def _display(invoice: Invoice) -> dict[str, Any] | None:
    if invoice.display_rate is None:
        return None
    rate = CrossRate(invoice.display_rate, invoice.rate_digits)
    total = rate.convert(invoice.total, invoice.display_digits - minor_digits(invoice.currency))
    shown = {"currency": invoice.display_currency, _rate_name(invoice): invoice.display_rate, "total": total}
    return shown | _digits(invoice.display_digits) | _rate_day(invoice.display_rate_on)


def _instant(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def in_words(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of the HTML and PDF."""
    zone = ZoneInfo(document["period"]["time_zone"])
    return {
        "title": _title(document),
        "number": document["number"] or "Draft",
        "issued": _day(document["issued_at"], zone) if document["issued_at"] else "Not yet",
        "due": _day(document["due_on"], zone) if document["due_on"] else "",
        "period": _month(document["period"], zone),
        "time_zone": document["period"]["time_zone"],
        "refers_to": document["refers_to"] or document.get("replaces", ""),
        "refers_label": _refers_label(document),
        "reason": document["reason"],
        "seller": party_words(document["seller"]),
        "buyer": party_words(document["buyer"]),
        "buyer_reference": document["buyer"].get("buyer_reference", ""),
        "po_number": document["buyer"].get("po_number", ""),
        "payment": document["seller"].get("payment_details", ""),
        "bank": _bank_words(document),
        "groups": [
            _group(key, list(lines), document["currency"]) for key, lines in groupby(document["lines"], key=_group_of)
        ],
        "totals": [*_totals(document)],
        "due_label": "Amount credited" if document["invoice_type"] not in CHARGES else "Amount due",
        "currency": document["currency"],
        "total": dollars(document["total"] - document.get("prepaid", 0), document["currency"]),
        "display": _display_words(document["display"], document["currency"]),
        "tax_currency": tax_words(document.get("tax_currency"), document["currency"]),
        "saved": _format_saved(document),
        "notes": [item["note"] for item in document["taxes"] if item["note"]],
        "sections": _sections(document),
    }


def divide_usage(lines: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return the names of the sections that divide the usage, each with the cents of its projects or cost centers.

    Each section sums to the lines of usage. Usage of one project, or without cost centers, has no section.
    """
    lines = list(lines)
    projects, centers = (sum_shares(lines, name) for name in ("project", "cost_center"))
    sections = (("project", projects, len(projects) > 1), ("cost_center", centers, any(name for name, _ in centers)))
    return [(name, sums) for name, sums, is_shown in sections if is_shown]


def _sections(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    currency = document["currency"]
    return [
        {
            "title": _SECTIONS[name],
            "rows": [(label or _NO_COST_CENTER, dollars(cents, currency)) for label, cents in sums],
            "total": dollars(sum(cents for _, cents in sums), currency),
        }
        for name, sums in divide_usage(document["lines"])
    ]


def _bank_words(document: Mapping[str, Any]) -> str:
    """Return the account to which the document is paid. Documents of the first format show it only in the XML."""
    seller = document["seller"]
    if document.get("format_version", 1) == 1 or not seller.get("iban") or document["invoice_type"] not in TRANSFERS:
        return ""
    return f"{bank_words(seller)} Reference: {document['number']}"


def bank_words(seller: Mapping[str, str]) -> str:
    """Return the bank account of a seller. Empty: it has none."""
    if not seller.get("iban"):
        return ""
    iban = " ".join(seller["iban"][start : start + 4] for start in range(0, len(seller["iban"]), 4))
    bic = f", BIC {seller['bic']}" if seller.get("bic") else ""
    return f"Bank account: IBAN {iban}{bic}."


def day_words(day: date) -> str:
    """Return a day as documents show it, such as 1 October 2026."""
    return f"{day.day} {day:%B %Y}"


def _title(document: Mapping[str, Any]) -> str:
    """Return the title. A purchase of credit that is not taxed yet is a receipt."""
    if document["invoice_type"] == "purchase" and document["taxes"][0]["category"] == "O":
        return "Receipt"
    return TITLES[document["invoice_type"]]


def _refers_label(document: Mapping[str, Any]) -> str:
    """Return the relation of the document to the one that it names."""
    if "replaces" in document:
        return "Replaces"
    if document["invoice_type"] == "cancellation":
        return "Cancels"
    return "Charges more on" if document["invoice_type"] in CHARGES else "Credits"


def _day(text: str, zone: ZoneInfo) -> str:
    moment = datetime.fromisoformat(text)
    local = moment.astimezone(zone) if moment.tzinfo else moment
    return f"{local.day} {local:%B %Y}"


def _month(period: Mapping[str, str], zone: ZoneInfo) -> str:
    """Format a month like 1 – 31 October 2026, with both days included."""
    first = datetime.fromisoformat(period["starts_at"]).astimezone(zone)
    last = (datetime.fromisoformat(period["ends_at"]) - timedelta(microseconds=1)).astimezone(zone)
    return f"{first.day} – {last.day} {last:%B %Y}"


def party_words(party: Mapping[str, str]) -> dict[str, Any]:
    """Return the name, the lines of the address, the VAT ID and the country of a seller or buyer."""
    town = " ".join(part for part in (party.get("postcode"), party.get("city")) if part)
    place = ", ".join(part for part in (town, party.get("region"), party.get("country")) if part)
    lines = [line for line in (party.get("street"), place) if line]
    return {
        "name": party["name"],
        "lines": lines,
        "vat_id": party.get("vat_id", ""),
        "country": party.get("country", ""),
    }


def _group_of(line: Mapping[str, Any]) -> tuple[str, str]:
    return (line["model"] or line["description"], line["tier"])


def _group(key: tuple[str, str], lines: list[Mapping[str, Any]], currency: str) -> dict[str, Any]:
    name, tier = key
    amount = dollars(sum(line["cents"] for line in lines), currency)
    return {"name": name, "tier": "" if tier in ("", "standard") else tier, "amount": amount,
            "lines": [_line_words(line, currency) for line in lines]}  # fmt: skip


def _line_words(line: Mapping[str, Any], currency: str) -> dict[str, str]:
    if line["nano_per_million"] is None:
        what = "Monthly commitment" if line["line_type"] == "commitment" else line["description"]
        amount = dollars(line["cents"], currency)
        return {"what": what, "note": "", "quantity": "1", "price": "", "amount": amount}
    note = (
        line["description"],
        f"used in {line['usage_month']}" if line["usage_month"] else "",
        f"prompts from {line['prompt_length_band']:,} tokens" if line["prompt_length_band"] else "",
        window_words(line["window"]),
        f"v{line['price_version']}",
    )
    return {
        "what": Component(line["component"]).invoice_label,
        "note": ", ".join(part for part in note if part),
        "quantity": f"{line['tokens']:,}",
        "price": f"{symbol(currency)}{decimal(line['nano_per_million'], NANO_DIGITS, 2)} / M",
        "amount": dollars(line["cents"], currency),
    }


def window_words(window: str) -> str:
    """Return the weekdays and hours of a price with their time zone."""
    return f"{window} UTC" if window[-1:].isdigit() else window


def _totals(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    currency = document["currency"]
    yield "Subtotal", dollars(document["subtotal"], currency)
    for credit in document["credits"]:
        yield credit["label"], dollars(-credit["cents"], currency)
    if document["credits"]:
        yield "Taxable amount", dollars(document["taxable"], currency)
    for item in document["taxes"]:
        label = f"{item['label']}, reverse charge" if item["category"] == "AE" else item["label"]
        yield f"{label} {decimal(item['rate_ppm'], 4)} %", dollars(item["tax"], currency)
    if prepaid := document.get("prepaid", 0):
        yield "Total", dollars(document["total"], currency)
        label = "Paid" if document["invoice_type"] == "purchase" else "Paid with prepaid credit"
        yield label, dollars(-prepaid, currency)


def _display_words(display: Mapping[str, Any] | None, currency: str) -> str:
    if display is None:
        return ""
    rate = _rate_words(display, currency)
    total = decimal_cents(display["total"], display.get("digits", DEFAULT_MINOR_DIGITS))
    return f"{display['currency']} {total} at {rate}, for information"


def tax_words(tax: Mapping[str, Any] | None, currency: str) -> str:
    if tax is None:
        return ""
    rate = _rate_words(tax, currency)
    amount = decimal_cents(tax["tax"], tax.get("digits", DEFAULT_MINOR_DIGITS))
    return f"Tax in {tax['currency']}: {amount}, at {rate}."


def _rate_words(amount: Mapping[str, Any], currency: str) -> str:
    names = ((f"{unit}_per_{currency.lower()}", digits) for digits, unit in _RATE_UNITS.items())
    name, digits = next(item for item in names if item[0] in amount)
    rate = f"{decimal(amount[name], digits, 2)} per {currency}"
    return f"{rate} of {_day(amount['rate_on'], ZoneInfo('UTC'))}" if "rate_on" in amount else rate


def _format_saved(document: Mapping[str, Any]) -> str:
    saved = cents(int(document["saved_femto"]), document["currency"])
    return dollars(saved, document["currency"]) if saved else ""
