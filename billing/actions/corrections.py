"""Actions that correct a final invoice: credit note, void and write-off."""

from __future__ import annotations

from collections.abc import Iterable

from billing.actions import credits
from billing.actions.common import booking
from billing.actions.drafts import notes_on, returned_credit, write
from billing.actions.invoices import do_finalize
from billing.actions.payments import next_key, outstanding
from billing.amounts import FEMTO_A_CENT, NANO_A_CENT, dollars
from billing.ledger import PostedEntry, post
from billing.models import Account, Invoice, InvoiceLine, LedgerEntry
from tenants import audit
from tenants.actions import ActionRefused, Conflict


def do_issue_credit_note(invoice: Invoice, amounts: Iterable[tuple[str, int]], reason: str) -> Invoice:
    """Issue a credit note on an invoice: pairs of description and cents before tax, at the invoice's tax.

    Raises:
        ActionRefused: nothing, or less. Conflict: the invoice is no longer owed or paid, or was less than that.
    """
    amounts = list(amounts)
    if not amounts or any(cents <= 0 for _, cents in amounts):
        raise ActionRefused("Every amount must be greater than zero.")
    with booking(invoice.tenant_id) as tenant:
        rows = Invoice.objects.for_tenant(tenant).select_related("entity", "period")
        billed = rows.select_for_update(of=("self",)).get(pk=invoice.pk)
        if billed.is_credit_note or billed.state not in (Invoice.State.OPEN, Invoice.State.PAID):
            raise Conflict("Only open or paid invoices can be credited.")
        same = Invoice.objects.for_tenant(tenant).filter(
            period=billed.period, invoice_type=Invoice.InvoiceType.CREDIT_NOTE
        )
        note = Invoice(
            tenant=tenant,
            entity=billed.entity,
            period=billed.period,
            invoice_type=Invoice.InvoiceType.CREDIT_NOTE,
            revision=same.count() + 1,
            refers_to=billed,
            reason=reason,
            complete=True,
        )
        lines = [_credit(note, number, *amount) for number, amount in enumerate(amounts, 1)]
        write(note, lines)
        left = note.taxable + returned_credit(note)
        if left < note.subtotal:
            raise Conflict(f"Only {dollars(left)} of this invoice can still be credited.")
        return do_finalize(note)


def _credit(note: Invoice, position: int, description: str, cents: int) -> InvoiceLine:
    return InvoiceLine(
        invoice=note,
        tenant_id=note.tenant_id,
        position=position,
        line_type=InvoiceLine.LineType.CREDIT,
        description=description,
        femto=cents * FEMTO_A_CENT,
        cents=cents,
    )


def do_void(invoice: Invoice, reason: str) -> Invoice:
    """Void an invoice without payments or credit notes. It keeps its number, and may be drafted again.

    Raises:
        Conflict: it is not open, or something was.
    """
    with booking(invoice.tenant_id):
        row = Invoice.objects.for_tenant(invoice.tenant_id).select_for_update().get(pk=invoice.pk)
        paid_by_credit = row.state == Invoice.State.PAID and row.total == 0
        is_unpaid = row.state == Invoice.State.OPEN and outstanding(row) == row.total
        if row.is_credit_note or not (is_unpaid or paid_by_credit) or notes_on(row).exists():
            raise Conflict("Only open invoices without payments or credits can be voided. Issue a credit note instead.")
        credits.do_give_back(row)
        booked = LedgerEntry.objects.for_tenant(row.tenant_id).filter(transaction__key=f"invoice:{row.pk}")
        undone = [PostedEntry(Account(entry.account), -entry.nano, row.pk) for entry in booked.order_by("pk")]
        post(row.tenant_id, f"void:{row.pk}", undone)
        _end(row, Invoice.State.VOID, "invoice.voided", reason)
    return row


def do_write_off(invoice: Invoice, reason: str) -> Invoice:
    """Write off the outstanding amount of an invoice.

    Raises:
        Conflict: it is not open.
    """
    with booking(invoice.tenant_id):
        row = Invoice.objects.for_tenant(invoice.tenant_id).select_for_update().get(pk=invoice.pk)
        if row.is_credit_note or row.state != Invoice.State.OPEN:
            raise Conflict("Only open invoices can be written off.")
        nano = outstanding(row) * NANO_A_CENT
        entries = [PostedEntry(Account.BAD_DEBT, nano, row.pk), PostedEntry(Account.RECEIVABLE, -nano, row.pk)]
        post(row.tenant_id, next_key(row, "bad-debt"), entries)
        _end(row, Invoice.State.UNCOLLECTIBLE, "invoice.written_off", reason)
    return row


def _end(invoice: Invoice, state: Invoice.State, action: str, reason: str) -> None:
    before = audit.serialize_for_audit(invoice)
    invoice.state = state
    invoice.save(update_fields=["state"])
    after = audit.serialize_for_audit(invoice) | {"reason": reason}
    audit.record(action, invoice, tenant_id=invoice.tenant_id, before=before, after=after)
