"""View model of an invoice, for its tenant and for operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from billing.amounts import FEMTO_A_CENT, decimal
from billing.invoicing import document
from billing.models import Account, Invoice, InvoiceEmail, InvoiceLine, LedgerEntry
from frontend.core.numbers import Money
from frontend.tenant.invoices.states import State, owed_on, state_of, today_of


@dataclass(frozen=True)
class InvoiceLineItem:
    """One line: tokens x price = exact, which is rounded once to `amount`."""

    label: str
    note: str
    tokens: int | None
    price: Money | None  # per 1M tokens
    exact: Money
    amount: Money
    events: int
    url: str  # URL of the usage; empty without usage


@dataclass(frozen=True)
class InvoiceGroup:
    name: str
    tier: str
    amount: Money
    lines: tuple[InvoiceLineItem, ...]


@dataclass(frozen=True)
class Total:
    label: str
    amount: Money


@dataclass(frozen=True)
class InvoiceParty:
    name: str
    lines: tuple[str, ...]
    vat_id: str


@dataclass(frozen=True)
class Movement:
    """A change of the balance due after the invoice was issued, from the ledger."""

    at: datetime
    label: str
    amount: Money
    url: str


@dataclass(frozen=True)
class ActivityEntry:
    at: datetime
    what: str
    detail: str


@dataclass(frozen=True)
class Document:
    number: str
    title: str
    state: State
    seller: InvoiceParty
    buyer: InvoiceParty
    period: str
    time_zone: str
    issued_at: datetime | None
    groups: tuple[InvoiceGroup, ...]
    totals: tuple[Total, ...]
    total_label: str
    total: Money
    movements: tuple[Movement, ...]
    owed: Money | None
    lines: int
    exact: Money  # all lines before rounding
    subtotal: Money
    residue: Money  # difference by rounding
    saved: Money
    versions: tuple[int, ...]
    notes: tuple[str, ...]
    reason: str
    refers_to: str
    refers_url: str
    display: str
    details: tuple[tuple[str, str], ...]
    happened: tuple[ActivityEntry, ...]

    @property
    def rounding(self) -> str:
        """The difference that rounding made, with its sign."""
        if not self.residue.femto:
            return "$0"
        sign = "+" if self.residue.femto > 0 else "−"
        return f"{sign}${Money(abs(self.residue.femto)).exact}"


def document_of(
    invoice: Invoice,
    lines: Iterable[InvoiceLine],
    now: datetime,
    *,
    line_url: Callable[[InvoiceLine], str],
    invoice_url: Callable[[int], str],
) -> Document:
    """Return the document of an invoice with its period, entity and `refers_to`.

    Call inside a scope that sees its tenant and its billing entity.
    """
    lines = list(lines)
    words = document.in_words(document.described(invoice, lines))
    final = invoice.pk is not None and invoice.state != Invoice.State.DRAFT
    owed = owed_on(LedgerEntry.objects.for_tenant(invoice.tenant_id), [invoice])[invoice.pk] if final else Money(0)
    exact = Money(sum(int(line.femto) for line in lines))
    return Document(
        invoice.number or "Draft",
        f"{words['title']} {invoice.number or 'draft'}",
        state_of(invoice, today_of(invoice, now), owed),
        _party(words["seller"]),
        _party(words["buyer"]),
        words["period"],
        words["time_zone"],
        invoice.issued_at,
        tuple(_group(key, list(found), line_url) for key, found in groupby(lines, key=_key)),
        tuple(_totals(invoice)),
        words["due_label"],
        Money.cents(invoice.total),
        _movements(invoice, invoice_url) if final and not invoice.is_credit_note else (),
        owed if final and not invoice.is_credit_note else None,
        len(lines),
        exact,
        Money.cents(invoice.subtotal),
        Money(int(invoice.rounding_femto)),
        Money(int(invoice.saved_femto)),
        tuple(sorted({line.price_version for line in lines if line.price_version})),
        tuple(words["notes"]),
        invoice.reason,
        words["refers_to"],
        invoice_url(invoice.refers_to_id) if invoice.refers_to_id else "",
        words["display"],
        tuple(_details(invoice, words)),
        tuple(_activity(invoice)) if final else (),
    )


def _party(party: dict[str, Any]) -> InvoiceParty:
    return InvoiceParty(party["name"], tuple(party["lines"]), party["vat_id"])


def _key(line: InvoiceLine) -> tuple[str, str]:
    return (line.model or line.description, line.tier)


def _group(key: tuple[str, str], lines: list[InvoiceLine], line_url: Callable[[InvoiceLine], str]) -> InvoiceGroup:
    name, tier = key
    amount = Money.cents(sum(line.cents for line in lines))
    return InvoiceGroup(
        name, "" if tier == "standard" else tier, amount, tuple(_line(line, line_url(line)) for line in lines)
    )


def _line(line: InvoiceLine, url: str) -> InvoiceLineItem:
    exact, amount = Money(int(line.femto)), Money.cents(line.cents)
    if line.nano_per_million is None:
        what = "Monthly commitment" if line.line_type == InvoiceLine.LineType.COMMITMENT else line.description
        return InvoiceLineItem(what, "", None, None, exact, amount, 0, "")
    return InvoiceLineItem(
        document.COMPONENTS[line.component],
        note_of(line),
        line.tokens,
        Money.nano(line.nano_per_million),
        exact,
        amount,
        line.events,
        url,
    )


def note_of(line: InvoiceLine) -> str:
    """Return the details that distinguish a line from its neighbors."""
    parts = (
        f"used in {line.usage_month}" if line.usage_month else "",
        f"prompts from {line.prompt_length_band:,} tokens" if line.prompt_length_band else "",
        f"{line.window} UTC" if line.window else "",
        f"v{line.price_version}",
    )
    return ", ".join(part for part in parts if part)


def _totals(invoice: Invoice) -> Iterable[Total]:
    yield Total("Subtotal", Money.cents(invoice.subtotal))
    for credit in invoice.credits:
        yield Total(credit["label"], Money.cents(-credit["cents"]))
    if invoice.credits:
        yield Total("Taxable amount", Money.cents(invoice.taxable))
    for tax in invoice.taxes:
        label = f"{tax['label']}, reverse charge" if tax["category"] == "AE" else tax["label"]
        yield Total(f"{label} {decimal(tax['rate_ppm'], 4)} %", Money.cents(tax["tax"]))


def _movements(invoice: Invoice, invoice_url: Callable[[int], str]) -> tuple[Movement, ...]:
    entries = LedgerEntry.objects.for_tenant(invoice.tenant_id).filter(account=Account.RECEIVABLE, invoice=invoice)
    rows = entries.exclude(transaction__key=f"invoice:{invoice.pk}").select_related("transaction").order_by("pk")
    notes = {
        note.pk: note
        for note in Invoice.objects.for_tenant(invoice.tenant_id).filter(refers_to=invoice).exclude(number=None)
    }
    return tuple(_movement(row, notes, invoice_url) for row in rows)


def _movement(entry: LedgerEntry, notes: dict[int, Invoice], invoice_url: Callable[[int], str]) -> Movement:
    kind, _, rest = entry.transaction.key.partition(":")
    amount, at, url = Money.nano(entry.nano), entry.transaction.created_at, ""
    if kind == "invoice" and rest.isdigit() and int(rest) in notes:
        label, url = f"Credit note {notes[int(rest)].number}", invoice_url(int(rest))
    elif kind == "match":
        label = "Payment" if entry.nano < 0 else "Payment reversed"
    else:
        label = {"void": "Reversed", "bad-debt": "Written off"}.get(kind, "Correction")
    return Movement(at, label, amount, url)


def _details(invoice: Invoice, words: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if invoice.pk:
        yield "Invoice ID", str(invoice.pk)
    if invoice.due_on is not None and invoice.issued_at is not None:
        yield "Terms", f"Net {(invoice.due_on - today_of(invoice, invoice.issued_at)).days}"
    if words["payment"]:
        yield "Payment", words["payment"]
    if words["po_number"]:
        yield "PO number", words["po_number"]
    if invoice.revision > 1:
        yield "Revision", str(invoice.revision)
    yield "Currency", "USD"


def _activity(invoice: Invoice) -> Iterable[ActivityEntry]:
    """Return the invoice's activity, newest first."""
    found = [ActivityEntry(invoice.issued_at, "Finalized", f"as {invoice.number}")] if invoice.issued_at else []
    sent = InvoiceEmail.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice, sent_at__isnull=False)
    for mail in sent.order_by("pk"):
        what = "Sent" if mail.email_type == InvoiceEmail.EmailType.ISSUED else "Reminder sent"
        found.append(ActivityEntry(mail.sent_at, what, f"to {', '.join(mail.sent_to)}"))  # type: ignore[arg-type]
    return sorted(found, key=lambda entry: entry.at, reverse=True)


def cents_of(line: InvoiceLine) -> tuple[Money, Money, Money]:
    """Return the exact amount of a line, the rounded amount and the difference."""
    exact, amount = Money(int(line.femto)), Money(line.cents * FEMTO_A_CENT)
    return exact, amount, amount - exact
