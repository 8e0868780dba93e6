"""Matching of deposits with invoices, and the balances of invoices."""

from __future__ import annotations

from collections.abc import Callable

from django.db.models import Sum

from billing.currencies.amounts import nano_a_cent
from billing.ledger.bad_debts import reinstate, written_off
from billing.ledger.ledger import PostedEntry, balance, next_key, post
from billing.ledger.webhook_events import emit_paid
from billing.models import CHARGES, Account, Invoice, LedgerEntry, Payment
from tenants import audit


def sum_outstanding(invoice: Invoice) -> int:
    """Return the outstanding cents of an invoice."""
    return balance(invoice.tenant_id, Account.RECEIVABLE, invoice.pk) // nano_a_cent(invoice.currency)


def match_deposits(tenant_id: int, first: int | None = None) -> bool:
    """Pay invoices from the tenant's deposits: the one with the id `first`, then open, then written-off ones, each from
    the oldest. Return whether there were deposits.
    """
    deposits = -balance(tenant_id, Account.DEPOSITS)
    if deposits <= 0:
        return False
    lost = Invoice.State.UNCOLLECTIBLE
    invoices = Invoice.objects.for_tenant(tenant_id).filter(
        invoice_type__in=CHARGES, state__in=[Invoice.State.OPEN, lost]
    )
    for invoice in sorted(invoices, key=lambda row: (row.pk != first, row.state == lost, row.issued_at, row.pk)):
        deposits -= _pay_from(invoice, deposits)
    return True


def pay_invoice(invoice: Invoice) -> None:
    """Pay an invoice from the tenant's deposits, and no other."""
    _pay_from(invoice, -balance(invoice.tenant_id, Account.DEPOSITS))


def _pay_from(invoice: Invoice, deposits: int) -> int:
    """Pay an invoice from deposits in nano-USD. Return the part that was used."""
    lost = invoice.state == Invoice.State.UNCOLLECTIBLE
    part = min(deposits, written_off(invoice) if lost else sum_outstanding(invoice) * nano_a_cent(invoice.currency))
    if part <= 0:
        return 0
    if lost:
        reinstate(invoice, part)
    _pay(invoice, part)
    return part


def _pay(invoice: Invoice, nano: int) -> None:
    """Move deposits to the invoice, or back if negative."""
    entries = [PostedEntry(Account.DEPOSITS, nano), PostedEntry(Account.RECEIVABLE, -nano, invoice.pk)]
    post(invoice.tenant_id, next_key(invoice, "match"), entries, invoice.currency)
    note_balance(invoice)


def note_balance(invoice: Invoice) -> None:
    """Mark an invoice as paid if nothing is outstanding or written off, and a paid one as open if that changed."""
    owed = sum_outstanding(invoice)
    state = Invoice.State(invoice.state)
    if state == Invoice.State.PAID and owed:
        state = Invoice.State.OPEN
    elif state in (Invoice.State.OPEN, Invoice.State.UNCOLLECTIBLE) and owed == 0 and written_off(invoice) == 0:
        state = Invoice.State.PAID
    if state == invoice.state:
        return
    before = audit.serialize_for_audit(invoice)
    invoice.state = state
    invoice.save(update_fields=["state"])
    after = audit.serialize_for_audit(invoice)
    action = "invoice.paid" if state == Invoice.State.PAID else "invoice.reopened"
    audit.record(action, invoice, tenant_id=invoice.tenant_id, before=before, after=after)
    if state == Invoice.State.PAID:
        emit_paid(invoice)


def reopen(payment: Payment, take_back: Callable[[Invoice, int], None]) -> None:
    """Reopen invoices after a refund that deposits do not cover: the payment's invoice, then the newest paid one.

    The refunded part of a written-off invoice is written off again.

    Args:
        take_back: takes back unused credit of a purchase, for an amount in cents, before the purchase is reopened.
    """
    missing = balance(payment.tenant_id, Account.DEPOSITS)
    paid = Invoice.objects.for_tenant(payment.tenant_id).filter(
        invoice_type__in=CHARGES, state__in=["paid", "open", "uncollectible"]
    )
    for invoice in sorted(paid, key=lambda row: (row.pk != payment.invoice_id, -row.pk)):
        matched = _sum_matched(invoice)
        part = min(missing, matched)
        if part > 0 and invoice.sells_credit:
            take_back(invoice, -(-part // nano_a_cent(invoice.currency)))
            invoice.refresh_from_db(fields=["state"])  # the credit note may have paid it
            missing = balance(payment.tenant_id, Account.DEPOSITS)
            part = min(missing, matched)
        if part > 0:
            _pay(invoice, -part)
            if invoice.state == Invoice.State.UNCOLLECTIBLE:
                reinstate(invoice, -part)
            missing -= part


def _sum_matched(invoice: Invoice) -> int:
    """Return the nano-USD of the invoice that were paid from deposits."""
    entries = LedgerEntry.objects.for_tenant(invoice.tenant_id).filter(
        invoice=invoice, account=Account.RECEIVABLE, transaction__key__startswith=f"match:{invoice.pk}:"
    )
    return -int(entries.aggregate(sum=Sum("nano"))["sum"] or 0)
