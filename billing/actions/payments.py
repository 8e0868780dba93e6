"""Actions on payments: record, match with invoices, refund."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django.db.models import Q, Sum

from billing.actions.common import booking
from billing.actions.credits import do_grant_credit
from billing.amounts import NANO_A_CENT, dollars
from billing.invoicing.webhook_events import emit_paid
from billing.ledger import PostedEntry, balance, post
from billing.models import Account, CreditGrant, Invoice, LedgerEntry, LedgerTransaction, Payment
from tenants import audit
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


class Received(NamedTuple):
    """A payment as a provider reports it: `cents` (negative: a refund) for a tenant or one of its invoices."""

    provider: str
    reference: str  # the provider's identifier
    cents: int
    received_at: datetime
    tenant: str = ""  # slug; or
    invoice: str = ""  # number
    as_credit: bool = False  # buys prepaid credit
    note: str = ""
    charge: str = ""  # the provider's identifier of the payment's charge
    refund_of: str = ""  # the reference or charge of the refunded payment, whose tenant and invoice then apply


def outstanding(invoice: Invoice) -> int:
    """Return the outstanding cents of an invoice."""
    return balance(invoice.tenant_id, Account.RECEIVABLE, invoice.pk) // NANO_A_CENT


def written_off(invoice: Invoice) -> int:
    """Return the nano-USD of an invoice that were written off and not paid later."""
    return balance(invoice.tenant_id, Account.BAD_DEBT, invoice.pk)


def do_record_payment(received: Received) -> tuple[Payment, bool]:
    """Book a payment and match it with open invoices, the named one first. Return the payment and whether it is new.

    Raises:
        Conflict: it names no known tenant or invoice, it was recorded with other values, or a refund exceeds the
            payments of the tenant.
    """
    tenant_id, invoice_id = _payer(received)
    with booking(tenant_id) as tenant:
        known = Payment.objects.all_tenants().filter(provider=received.provider, reference=received.reference).first()
        if known is not None:
            if (known.tenant_id, known.cents) != (tenant.pk, received.cents):
                raise Conflict(f"Payment {received.reference} was already recorded with another amount or tenant.")
            return known, False
        if received.cents < 0:
            _require_payments(tenant.pk, -received.cents)
        payment = Payment.objects.create(
            tenant=tenant,
            provider=received.provider,
            reference=received.reference,
            cents=received.cents,
            received_at=received.received_at,
            invoice_id=invoice_id,
            note=received.note,
            charge=received.charge,
        )
        nano = received.cents * NANO_A_CENT
        post(
            tenant.pk, f"payment:{payment.pk}", [PostedEntry(Account.CASH, nano), PostedEntry(Account.DEPOSITS, -nano)]
        )
        audit.record("payment.recorded", payment, tenant_id=tenant.pk, after=audit.serialize_for_audit(payment))
        if received.cents < 0:
            _reopen(payment)
        elif received.as_credit:
            do_grant_credit(tenant.pk, CreditGrant.GrantType.PREPAID, nano, note=f"Payment {received.reference}"[:200])
        else:
            match_deposits(tenant.pk, invoice_id)
    return payment, True


def _payer(received: Received) -> tuple[int, int | None]:
    with all_tenants_scope(BypassReason.BILLING):
        if payment := _refunded(received):
            return payment.tenant_id, payment.invoice_id
        if received.invoice:
            invoices = Invoice.objects.all_tenants().filter(number=received.invoice)
            if received.tenant:
                invoices = invoices.filter(tenant__slug=received.tenant)
            matches = list(invoices.values_list("tenant_id", "pk")[:2])
            if len(matches) == 1:
                return matches[0]
        elif tenant := Tenant.objects.all_tenants().filter(slug=received.tenant).first():
            return tenant.pk, None
    if received.refund_of:
        raise Conflict(f"Record payment {received.refund_of} first: {received.reference} refunds it.")
    raise Conflict(f"Payment {received.reference} has no known tenant or invoice.")


def _refunded(received: Received) -> Payment | None:
    if not received.refund_of:
        return None
    name = Q(reference=received.refund_of) | Q(charge=received.refund_of)
    return Payment.objects.all_tenants().filter(name, provider=received.provider, cents__gt=0).first()


def _require_payments(tenant_id: int, cents: int) -> None:
    payments = Payment.objects.for_tenant(tenant_id)
    received = payments.aggregate(sum=Sum("cents"))["sum"] or 0
    if cents > received:
        raise Conflict(
            f"The refund exceeds the tenant’s payments of {dollars(received)}. Record the refunded payment first."
        )


def match_deposits(tenant_id: int, first: int | None = None) -> None:
    """Pay invoices from the tenant's deposits: the one with the id `first`, then open, then written-off ones, each from
    the oldest.
    """
    deposits = -balance(tenant_id, Account.DEPOSITS)
    lost = Invoice.State.UNCOLLECTIBLE
    invoices = Invoice.objects.for_tenant(tenant_id).filter(
        invoice_type=Invoice.InvoiceType.INVOICE, state__in=[Invoice.State.OPEN, lost]
    )
    for invoice in sorted(invoices, key=lambda row: (row.pk != first, row.state == lost, row.issued_at, row.pk)):
        due = written_off(invoice) if invoice.state == lost else outstanding(invoice) * NANO_A_CENT
        part = min(deposits, due)
        if part > 0:
            if invoice.state == lost:
                _reinstate(invoice, part)
            _pay(invoice, part)
            deposits -= part


def next_key(invoice: Invoice, name: str) -> str:
    """Return the key of the invoice's next ledger transaction of that name."""
    start = f"{name}:{invoice.pk}:"
    transactions = LedgerTransaction.objects.for_tenant(invoice.tenant_id).filter(key__startswith=start)
    return f"{start}{transactions.count()}"


def _reinstate(invoice: Invoice, nano: int) -> None:
    """Make a written-off amount outstanding again; a negative amount is written off again."""
    entries = [PostedEntry(Account.RECEIVABLE, nano, invoice.pk), PostedEntry(Account.BAD_DEBT, -nano, invoice.pk)]
    post(invoice.tenant_id, next_key(invoice, "recovery"), entries)


def _pay(invoice: Invoice, nano: int) -> None:
    """Move deposits to the invoice, or back if negative."""
    entries = [PostedEntry(Account.DEPOSITS, nano), PostedEntry(Account.RECEIVABLE, -nano, invoice.pk)]
    post(invoice.tenant_id, next_key(invoice, "match"), entries)
    note_balance(invoice)


def note_balance(invoice: Invoice) -> None:
    """Mark an invoice as paid if nothing is outstanding or written off, and a paid one as open if that changed."""
    owed = outstanding(invoice)
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


def _reopen(payment: Payment) -> None:
    """Reopen invoices after a refund that deposits do not cover: the payment's invoice, then the newest paid one.

    The refunded part of a written-off invoice is written off again.
    """
    missing = balance(payment.tenant_id, Account.DEPOSITS)
    paid = Invoice.objects.for_tenant(payment.tenant_id).filter(
        invoice_type=Invoice.InvoiceType.INVOICE, state__in=["paid", "open", "uncollectible"]
    )
    for invoice in sorted(paid, key=lambda row: (row.pk != payment.invoice_id, -row.pk)):
        matched = _matched(invoice)
        part = min(missing, matched)
        if part > 0:
            _pay(invoice, -part)
            if invoice.state == Invoice.State.UNCOLLECTIBLE:
                _reinstate(invoice, -part)
            missing -= part


def _matched(invoice: Invoice) -> int:
    """Return the nano-USD of the invoice that were paid from deposits."""
    entries = LedgerEntry.objects.for_tenant(invoice.tenant_id).filter(
        invoice=invoice, account=Account.RECEIVABLE, transaction__key__startswith=f"match:{invoice.pk}:"
    )
    return -int(entries.aggregate(sum=Sum("nano"))["sum"] or 0)
