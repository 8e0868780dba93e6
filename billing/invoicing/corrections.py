"""Actions that correct a final invoice: credit note, debit note, void and write-off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from billing.currencies.amounts import decimal_cents, dollars, femto_a_cent, nano_a_cent
from billing.invoicing.drafts import creditable, debits_and_credits, write
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.lines import lines_of
from billing.ledger import credits
from billing.ledger.bad_debts import book_relief, book_write_off, convert_tax, has_relief
from billing.ledger.booking import booking, require_bookable
from billing.ledger.matching import sum_outstanding
from billing.ledger.webhook_events import emit_voided, emit_written_off
from billing.models import Invoice, InvoiceLine, OneOffLine, ReratedInvoice
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import ActionRefused, Conflict


def do_issue_credit_note(invoice: Invoice, amounts: Iterable[tuple[str, int]], reason: str) -> Invoice:
    """Issue a credit note on an invoice: pairs of description and cents before tax, at the invoice's tax.

    Raises:
        ActionRefused: nothing, or less. Conflict: the invoice is no longer owed or paid, or was less than that.
    """
    amounts = _amounts(amounts, invoice.currency)
    with booking(invoice.tenant_id):
        billed = _lock_billed(invoice)
        if billed.is_credit_note or billed.state not in (Invoice.State.OPEN, Invoice.State.PAID):
            raise Conflict(Text("Only open or paid invoices can be credited."))
        if billed.sells_credit:
            raise Conflict(Text("A purchase of prepaid credit cannot be credited. Refund its payment instead."))
        note = note_on(billed, Invoice.InvoiceType.CREDIT_NOTE, reason)
        lines = [amount_line(note, *amount) for amount in amounts]
        left = creditable(billed)
        if left < sum(cents for _, cents in amounts):
            raise Conflict(
                Text("Only %(amount)s of this invoice can still be credited.", amount=dollars(left, billed.currency))
            )
        return do_finalize(write(note, lines))


def do_issue_debit_note(invoice: Invoice, amounts: Iterable[tuple[str, int]], reason: str) -> Invoice:
    """Issue a debit note on an invoice: pairs of description and cents before tax, at the invoice's tax.

    Raises:
        ActionRefused: nothing, or less. Conflict: the document is no final invoice.
    """
    amounts = _amounts(amounts, invoice.currency)
    with booking(invoice.tenant_id):
        billed = _lock_billed(invoice)
        if not can_debit(billed):
            raise Conflict(Text("Only final invoices that are not void can be debited. Add a one-off line instead."))
        note = note_on(billed, Invoice.InvoiceType.DEBIT_NOTE, reason)
        lines = [amount_line(note, *amount) for amount in amounts]
        return do_finalize(write(note, lines))


def can_debit(invoice: Invoice) -> bool:
    """Return whether a debit note on the document can be issued."""
    final = (Invoice.State.OPEN, Invoice.State.PAID, Invoice.State.UNCOLLECTIBLE)
    return invoice.invoice_type == Invoice.InvoiceType.INVOICE and invoice.state in final


def _amounts(amounts: Iterable[tuple[str, int]], currency: str) -> list[tuple[str, int]]:
    amounts = list(amounts)
    if not amounts or any(cents <= 0 for _, cents in amounts):
        raise ActionRefused(Text("Every amount must be greater than zero."))
    require_bookable(sum(cents for _, cents in amounts), currency)
    return amounts


def _lock_billed(invoice: Invoice) -> Invoice:
    rows = Invoice.objects.for_tenant(invoice.tenant_id).select_related("entity", "period", "tenant")
    billed: Invoice = rows.select_for_update(of=("self",)).get(pk=invoice.pk)
    return billed


def note_on(billed: Invoice, invoice_type: Invoice.InvoiceType, reason: str) -> Invoice:
    """Return an unsaved credit note or debit note on an invoice."""
    same = Invoice.objects.for_tenant(billed.tenant_id).filter(period=billed.period, invoice_type=invoice_type)
    return Invoice(
        tenant=billed.tenant,
        entity=billed.entity,
        period=billed.period,
        invoice_type=invoice_type,
        revision=same.count() + 1,
        refers_to=billed,
        currency=billed.currency,
        reason=reason,
        complete=True,
    )


def amount_line(note: Invoice, description: str, cents: int) -> InvoiceLine:
    """Return a line of a fixed amount on a credit note or debit note."""
    line_type = InvoiceLine.LineType.CREDIT if note.is_credit_note else InvoiceLine.LineType.ONE_OFF
    return InvoiceLine(
        invoice=note,
        tenant_id=note.tenant_id,
        line_type=line_type,
        description=description,
        femto=cents * femto_a_cent(note.currency),
        cents=cents,
    )


def do_void(invoice: Invoice, reason: str, now: datetime | None = None) -> Invoice:
    """Void an invoice without payments or credit notes, by a cancellation with a number and a date of its own.

    The invoice keeps its number, and may be drafted again. Its tax counts in the month of its issue. The cancellation
    returns the tax in the month of the void.

    Raises:
        Conflict: it is not open, or something was, or a re-rating issued it.
    """
    with booking(invoice.tenant_id):
        row = _lock_billed(invoice)
        if (obstacle := find_void_obstacle(row)) is not None:
            raise Conflict(obstacle)
        credits.do_give_back(row)
        OneOffLine.objects.for_tenant(row.tenant_id).filter(invoice=row).update(invoice=None)
        cancellation = _cancel(row, reason, now)
        _end(row, Invoice.State.VOID, "invoice.voided", reason)
        emit_voided(row, str(cancellation.number))
    return row


def find_void_obstacle(row: Invoice) -> Text | None:
    """Return why an invoice cannot be voided, or None."""
    if row.sells_credit:
        return Text("A purchase of prepaid credit cannot be voided. Refund its payment instead.")
    if ReratedInvoice.objects.for_tenant(row.tenant_id).filter(note=row).exists():
        return Text(
            "%(number)s is a note of a re-rating. Apply another re-rating to change its prices back.",
            number=row.number,
        )
    paid_by_credit = row.state == Invoice.State.PAID and row.total == row.prepaid
    is_unpaid = row.state == Invoice.State.OPEN and sum_outstanding(row) == row.total - row.prepaid
    has_notes = debits_and_credits(row).exclude(state=Invoice.State.VOID).exists()
    if row.is_credit_note or not (is_unpaid or paid_by_credit) or has_notes:
        return Text("Only open invoices without payments or credits can be voided. Issue a credit note instead.")
    return None


def _cancel(invoice: Invoice, reason: str, now: datetime | None) -> Invoice:
    """Issue the cancellation of an invoice or debit note: a credit note with its lines, credits, taxes and total."""
    note = note_on(invoice, Invoice.InvoiceType.CANCELLATION, reason)
    copied = [field.attname for field in InvoiceLine._meta.concrete_fields if field.attname not in ("id", "invoice_id")]
    lines = [InvoiceLine(invoice=note, **{name: getattr(line, name) for name in copied}) for line in lines_of(invoice)]
    return do_finalize(write(note, lines), now)


def do_write_off(invoice: Invoice, reason: str) -> Invoice:
    """Write off the outstanding amount of an invoice. Its tax is not owed, unless the entity has to claim that first.

    Raises:
        Conflict: it is not open.
    """
    with booking(invoice.tenant_id):
        row = _lock_billed(invoice)
        if row.is_credit_note or row.state != Invoice.State.OPEN:
            raise Conflict(Text("Only open invoices can be written off."))
        cents = sum_outstanding(row)
        key = book_write_off(row, cents * nano_a_cent(row.currency))
        relief = {} if row.entity.relief_after_claim or not _has_tax(row) else _relieve(row)
        _end(row, Invoice.State.UNCOLLECTIBLE, "invoice.written_off", reason, relief)
        emit_written_off(row, key, cents)
    return row


def do_claim_tax_relief(invoice: Invoice, reason: str) -> Invoice:
    """Record that the relief of a written-off invoice's tax was claimed, which reduces the output tax from now on.

    Raises:
        Conflict: it is not written off, its tax was relieved before, or it has no tax.
    """
    with booking(invoice.tenant_id):
        row = _lock_billed(invoice)
        if row.state != Invoice.State.UNCOLLECTIBLE:
            raise Conflict(Text("Only written-off invoices have tax to relieve. Write off the invoice first."))
        if not _has_tax(row):
            raise Conflict(Text("%(number)s has no tax.", number=row.number))
        if has_relief(row):
            raise Conflict(Text("The tax of %(number)s is relieved already.", number=row.number))
        before = audit.serialize_for_audit(row)
        after = before | _relieve(row) | {"reason": reason}
        audit.record("invoice.tax_relief_claimed", row, tenant_id=row.tenant_id, before=before, after=after)
    return row


def can_claim_relief(invoice: Invoice) -> bool:
    """Return whether `do_claim_tax_relief` is possible."""
    return invoice.state == Invoice.State.UNCOLLECTIBLE and _has_tax(invoice) and not has_relief(invoice)


def _has_tax(invoice: Invoice) -> bool:
    return any(tax["tax"] for tax in invoice.taxes)


def _relieve(invoice: Invoice) -> dict[str, Any]:
    """Book the relief of the written-off tax. Return it for the audit log, also in the tax currency if there is one."""
    nano = book_relief(invoice)
    shown: dict[str, Any] = {"tax_relief_cents": nano // nano_a_cent(invoice.currency)}
    if invoice.tax_rate is not None:
        shown["tax_relief"] = f"{invoice.tax_currency} {decimal_cents(convert_tax(invoice, nano), invoice.tax_digits)}"
    return shown


def _end(
    invoice: Invoice, state: Invoice.State, action: str, reason: str, details: Mapping[str, Any] | None = None
) -> None:
    before = audit.serialize_for_audit(invoice)
    invoice.state = state
    invoice.save(update_fields=["state"])
    after = audit.serialize_for_audit(invoice) | {"reason": reason, **(details or {})}
    audit.record(action, invoice, tenant_id=invoice.tenant_id, before=before, after=after)
