"""Webhook events and notifications about invoices, written in the transaction that changes them."""

from __future__ import annotations

from typing import Any

from django.db.models import Max

from billing.models import Invoice, LedgerEntry, Payment
from inference_worker.contract.texts import Text
from tenants.currencies import dollars
from tenants.notifications.kinds import INVOICE_ISSUED, INVOICE_PAST_DUE
from tenants.notifications.notifying import Notice, notify
from tenants.webhooks import event_types
from tenants.webhooks.outbox import enqueue


def emit_finalized(invoice: Invoice) -> None:
    """Emit the event of an issued invoice or credit note, and notify of it."""
    event_type = event_types.CREDIT_NOTE_FINALIZED if invoice.is_credit_note else event_types.INVOICE_FINALIZED
    data = event_types.InvoiceData(**_describe_fields(invoice))
    enqueue(invoice.tenant_id, event_type, f"invoice:{invoice.pk}:finalized", data)
    values = {"number": invoice.number, "total": dollars(invoice.total, invoice.currency)}
    if invoice.is_credit_note:
        text = Text("Credit note %(number)s was issued: %(total)s", **values)
    else:
        text = Text("Invoice %(number)s was issued: %(total)s", **values)
    notify(INVOICE_ISSUED, invoice.tenant_id, Notice(str(invoice.pk), text, f"invoices/{invoice.pk}"))


def emit_paid(invoice: Invoice) -> None:
    """Emit the event of a paid invoice. A refund may reopen it, so it may be emitted again."""
    entries = LedgerEntry.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice)
    last = entries.aggregate(last=Max("pk"))["last"]
    data = event_types.InvoiceData(**_describe_fields(invoice))
    enqueue(invoice.tenant_id, event_types.INVOICE_PAID, f"invoice:{invoice.pk}:paid:{last}", data)


def emit_past_due(invoice: Invoice, number: int, owed_cents: int) -> None:
    """Emit the event of the `number`th reminder, and notify of it."""
    data = event_types.PastDueInvoiceData(**_describe_fields(invoice), owed_cents=owed_cents, reminder=number)
    enqueue(invoice.tenant_id, event_types.INVOICE_PAST_DUE, f"invoice:{invoice.pk}:past_due:{number}", data)
    owed = dollars(owed_cents, invoice.currency)
    text = Text("Invoice %(number)s is past due: %(owed)s outstanding", number=invoice.number, owed=owed)
    notify(INVOICE_PAST_DUE, invoice.tenant_id, Notice(f"{invoice.pk}:{number}", text, f"invoices/{invoice.pk}"))


def emit_voided(invoice: Invoice, cancelled_by: str) -> None:
    """Emit the event of an invoice that was voided by a cancellation with this number."""
    data = event_types.VoidedInvoiceData(**_describe_fields(invoice), cancelled_by=cancelled_by)
    enqueue(invoice.tenant_id, event_types.INVOICE_VOIDED, f"invoice:{invoice.pk}:voided", data)


def emit_written_off(invoice: Invoice, key: str, cents: int) -> None:
    """Emit the event of a write-off, which `key` names in the ledger."""
    data = event_types.WrittenOffInvoiceData(**_describe_fields(invoice), written_off_cents=cents)
    enqueue(invoice.tenant_id, event_types.INVOICE_WRITTEN_OFF, f"invoice:{key}", data)


def emit_payment(payment: Payment) -> None:
    """Emit the event of a recorded payment or refund."""
    data = event_types.PaymentData(
        payment_id=payment.pk,
        provider=payment.provider,
        reference=payment.reference,
        amount_cents=payment.cents,
        currency=payment.currency,
        received_at=payment.received_at.isoformat(),
        invoice=payment.invoice.number if payment.invoice else None,
    )
    enqueue(payment.tenant_id, event_types.PAYMENT_RECORDED, f"payment:{payment.pk}", data)


def _describe_fields(invoice: Invoice) -> dict[str, Any]:
    return {
        "invoice_id": invoice.pk,
        "number": invoice.number,
        "invoice_type": invoice.invoice_type,
        "state": invoice.state,
        "period": invoice.period.label,
        "currency": invoice.currency,
        "subtotal_cents": invoice.subtotal,
        "total_cents": invoice.total,
        "prepaid_cents": invoice.prepaid,
        "issued_at": invoice.issued_at and invoice.issued_at.isoformat(),
        "due_on": invoice.due_on and invoice.due_on.isoformat(),
        "refers_to": invoice.refers_to and invoice.refers_to.number,
        "replaces": invoice.replaces and invoice.replaces.number,
    }
