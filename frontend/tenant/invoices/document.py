"""The document of an invoice, for its tenant and for operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import groupby
from typing import Any

from django.utils.translation import gettext as _

from billing.currencies.amounts import decimal, symbol
from billing.invoicing import document
from billing.models import Account, Invoice, InvoiceEmail, InvoiceLine, LedgerEntry
from billing.rates.pricing import Component
from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money, exact
from frontend.tenant.invoices.states import owed_on, state_of, today_of

# The words of the document, which is in English, on pages of the console.
_WORDS = {
    "Amount credited": _lazy("Amount credited"),
    "Amount due": _lazy("Amount due"),
    "Cancellation": _lazy("Cancellation"),
    "Credit note": _lazy("Credit note"),
    "Debit note": _lazy("Debit note"),
    "Invoice": _lazy("Invoice"),
    "Receipt": _lazy("Receipt"),
}


def word(text: str) -> str:
    """Return a word of the document in the language of the page."""
    return str(_WORDS.get(text, text))


def document_of(
    invoice: Invoice,
    lines: Iterable[InvoiceLine],
    now: datetime,
    *,
    line_url: Callable[[InvoiceLine], str],
    invoice_url: Callable[[int], str],
) -> dict[str, Any]:
    """Return the document of an invoice with its period, entity and `refers_to`, for its tenant and for operators.

    Call inside a scope that sees its tenant and its billing entity.
    """
    lines, currency = list(lines), invoice.currency
    described = document.describe_invoice(invoice, lines)
    words = document.in_words(described)
    final = invoice.pk is not None and invoice.state != Invoice.State.DRAFT
    owed = (
        owed_on(LedgerEntry.objects.for_tenant(invoice.tenant_id), [invoice])[invoice.pk]
        if final
        else Money(0, currency)
    )
    residue = Money(int(invoice.rounding_femto), currency)
    return {
        "invoice": invoice,
        "words": words,
        "title": f"{word(words['title'])} {invoice.number or _('draft')}",
        "due_label": word(words["due_label"]),
        "state": state_of(invoice, today_of(invoice, now), owed),
        "groups": [_group(key, list(found), line_url, currency) for key, found in groupby(lines, key=_key)],
        "totals": list(_totals(invoice)),
        "sections": _sections(described),
        "total": Money.cents(invoice.total - invoice.prepaid, currency),
        "movements": _movements(invoice, invoice_url) if final and not invoice.is_credit_note else [],
        "owed": owed,
        "lines": len(lines),
        "exact": Money(sum(int(line.femto) for line in lines), currency),  # before rounding
        "rounding": format_rounding(residue) if residue.femto else f"{symbol(currency)}0",
        "saved": Money(int(invoice.saved_femto), currency),
        "versions": sorted({line.price_version for line in lines if line.price_version}),
        "refers_url": invoice_url(invoice.refers_to_id) if invoice.refers_to_id else "",
        "related": _find_related(invoice, invoice_url) if final else [],
        "details": list(_details(invoice, words)),
        "happened": _activity(invoice) if final else [],
    }


def _sections(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the usage by project and by cost center."""
    currency, titles = (
        described["currency"],
        {"project": _("Usage by project"), "cost_center": _("Usage by cost center")},
    )
    return [
        {
            "title": titles[name],
            "rows": [(label or _("No cost center"), Money.cents(cents, currency)) for label, cents in sums],
            "total": Money.cents(sum(cents for _label, cents in sums), currency),
        }
        for name, sums in document.divide_usage(described["lines"])
    ]


def format_rounding(residue: Money) -> str:
    """Return the difference that rounding made, with its sign."""
    return f"{'+' if residue.femto > 0 else '−'}{Money(abs(residue.femto), residue.currency).exact_text}"


def _find_related(invoice: Invoice, invoice_url: Callable[[int], str]) -> list[tuple[str, str, str]]:
    """Return the documents that cancel or replace the invoice or that it replaces: relation, number and URL."""
    documents = Invoice.objects.for_tenant(invoice.tenant_id).exclude(number=None).order_by("pk")
    cancellations = documents.filter(refers_to=invoice, invoice_type=Invoice.InvoiceType.CANCELLATION)
    found = [(_("Cancelled by"), row) for row in cancellations]
    found += [(_("Replaced by"), row) for row in documents.filter(replaces=invoice)]
    if invoice.replaces is not None:
        found.append((_("Replaces"), invoice.replaces))
    return [(label, str(row.number), invoice_url(row.pk)) for label, row in found]


def _key(line: InvoiceLine) -> tuple[str, str]:
    return (line.model or line.description, line.tier)


def _group(
    key: tuple[str, str], lines: list[InvoiceLine], line_url: Callable[[InvoiceLine], str], currency: str
) -> dict[str, Any]:
    name, tier = key
    return {
        "name": name,
        "tier": "" if tier == "standard" else tier,
        "amount": Money.cents(sum(line.cents for line in lines), currency),
        "lines": [_line(line, line_url(line), currency) for line in lines],
    }


def _line(line: InvoiceLine, url: str, currency: str) -> dict[str, Any]:
    """Return one line: tokens x price = exact, which is rounded once to `amount`."""
    amounts = {"exact": Money(int(line.femto), currency), "amount": Money.cents(line.cents, currency)}
    if line.nano_per_million is None:
        what = _("Monthly commitment") if line.line_type == InvoiceLine.LineType.COMMITMENT else line.description
        return {"label": what, "note": "", "tokens": None, "price": None, "url": "", **amounts}
    return {
        "label": translate_message(Component(line.component).invoice_label),
        "note": note_of(line),
        "tokens": line.tokens,
        "price": Money.nano(line.nano_per_million, currency),  # per 1M tokens
        "url": "" if line.description else url,  # a line of a re-rating has the difference of its events
        **amounts,
    }


def note_of(line: InvoiceLine) -> str:
    """Return the details that distinguish a line from its neighbors."""
    parts = (
        line.description,
        _("used in %(usage_month)s") % {"usage_month": line.usage_month} if line.usage_month else "",
        _("prompts from %(prompt_length_band)s tokens") % {"prompt_length_band": exact(line.prompt_length_band)}
        if line.prompt_length_band
        else "",
        document.window_words(line.window),
        f"v{line.price_version}",
    )
    return ", ".join(part for part in parts if part)


def _totals(invoice: Invoice) -> Iterable[tuple[str, Money]]:
    yield (_("Subtotal"), Money.cents(invoice.subtotal, invoice.currency))
    for credit in invoice.credits:
        yield (credit["label"], Money.cents(-credit["cents"], invoice.currency))
    if invoice.credits:
        yield (_("Taxable amount"), Money.cents(invoice.taxable, invoice.currency))
    for tax in invoice.taxes:
        label = _("%(label)s, reverse charge") % {"label": tax["label"]} if tax["category"] == "AE" else tax["label"]
        yield (f"{label} {decimal(tax['rate_ppm'], 4)} %", Money.cents(tax["tax"], invoice.currency))
    if invoice.prepaid:
        yield (_("Total"), Money.cents(invoice.total, invoice.currency))
        is_purchase = invoice.invoice_type == Invoice.InvoiceType.PURCHASE
        yield (
            _("Paid") if is_purchase else _("Paid with prepaid credit"),
            Money.cents(-invoice.prepaid, invoice.currency),
        )


_MOVEMENTS = {"void": _lazy("Reversed"), "bad-debt": _lazy("Written off"), "recovery": _lazy("Write-off reversed")}


def _movements(invoice: Invoice, invoice_url: Callable[[int], str]) -> list[tuple[Any, ...]]:
    """Return the changes of the balance due after the invoice was issued: time, label, amount and URL."""
    entries = LedgerEntry.objects.for_tenant(invoice.tenant_id).filter(account=Account.RECEIVABLE, invoice=invoice)
    rows = entries.exclude(transaction__key=f"invoice:{invoice.pk}").select_related("transaction").order_by("pk")
    notes = {
        note.pk: note
        for note in Invoice.objects.for_tenant(invoice.tenant_id).filter(refers_to=invoice).exclude(number=None)
    }
    return [_movement(row, notes, invoice_url) for row in rows]


def _movement(entry: LedgerEntry, notes: dict[int, Invoice], invoice_url: Callable[[int], str]) -> tuple[Any, ...]:
    kind, _sign, rest = entry.transaction.key.partition(":")
    amount, at, url = Money.nano(entry.nano, entry.transaction.currency), entry.transaction.created_at, ""
    if kind == "invoice" and rest.isdigit() and int(rest) in notes:
        note = notes[int(rest)]
        text = _("Cancellation %(number)s") if note.cancels else _("Credit note %(number)s")
        label, url = text % {"number": note.number}, invoice_url(note.pk)
    elif kind == "match":
        label = _("Payment") if entry.nano < 0 else _("Payment reversed")
    else:
        label = _MOVEMENTS.get(kind, _("Correction"))
    return at, label, amount, url


def _details(invoice: Invoice, words: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if invoice.pk:
        yield _("Invoice ID"), str(invoice.pk)
    if invoice.due_on is not None and invoice.issued_at is not None:
        yield _("Terms"), _("Net %(days)s") % {"days": (invoice.due_on - today_of(invoice, invoice.issued_at)).days}
    if words["payment"]:
        yield _("Payment"), words["payment"]
    if words["bank"]:
        yield _("Bank transfer"), words["bank"]
    if words["po_number"]:
        yield _("PO number"), words["po_number"]
    if words["buyer_reference"]:
        yield _("Buyer reference"), words["buyer_reference"]
    if invoice.revision > 1:
        yield _("Revision"), str(invoice.revision)
    yield _("Currency"), invoice.currency


_EMAILS: Mapping[str, str] = {
    InvoiceEmail.EmailType.ISSUED: _lazy("Sent"),
    InvoiceEmail.EmailType.REMINDER: _lazy("Reminder sent"),
    InvoiceEmail.EmailType.SUSPENSION: _lazy("Notice of suspension sent"),
}


def _activity(invoice: Invoice) -> list[tuple[datetime, str, str]]:
    """Return the invoice's activity, newest first: time, event and details."""
    found = (
        [(invoice.issued_at, _("Finalized"), _("as %(number)s") % {"number": invoice.number})]
        if invoice.issued_at
        else []
    )
    sent = InvoiceEmail.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice, sent_at__isnull=False)
    for mail in sent.order_by("pk"):
        to = _("to %(sent_to)s") % {"sent_to": ", ".join(mail.sent_to)}
        found.append((mail.sent_at, str(_EMAILS[mail.email_type]), to))  # type: ignore[arg-type]
    return sorted(found, key=lambda entry: entry[0], reverse=True)


def cents_of(line: InvoiceLine, currency: str) -> tuple[Money, Money, Money]:
    """Return the exact amount of a line, the rounded amount and the difference."""
    exact, amount = Money(int(line.femto), currency), Money.cents(line.cents, currency)
    return exact, amount, amount - exact
