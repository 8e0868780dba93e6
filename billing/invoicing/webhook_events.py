"""Webhook events about invoices, emitted in the transaction that changes them."""

from __future__ import annotations

from django.db.models import Max

from billing.models import Invoice, LedgerEntry, Payment
from tenants.webhooks.outbox import enqueue


def emit_finalized(invoice: Invoice) -> None:
    """Emit the event of an issued invoice or credit note."""
    event_type = "credit_note.finalized" if invoice.is_credit_note else "invoice.finalized"
    enqueue(invoice.tenant_id, event_type, f"invoice:{invoice.pk}:finalized", _describe_fields(invoice))


def emit_paid(invoice: Invoice) -> None:
    """Emit the event of a paid invoice. A refund may reopen it, so it may be emitted again."""
    entries = LedgerEntry.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice)
    last = entries.aggregate(last=Max("pk"))["last"]
    enqueue(invoice.tenant_id, "invoice.paid", f"invoice:{invoice.pk}:paid:{last}", _describe_fields(invoice))


def emit_past_due(invoice: Invoice, number: int, owed_cents: int) -> None:
    """Emit the event of the `number`th reminder."""
    payload = _describe_fields(invoice) | {"owed_cents": owed_cents, "reminder": number}
    enqueue(invoice.tenant_id, "invoice.past_due", f"invoice:{invoice.pk}:past_due:{number}", payload)


def emit_voided(invoice: Invoice) -> None:
    """Emit the event of a voided invoice."""
    enqueue(invoice.tenant_id, "invoice.voided", f"invoice:{invoice.pk}:voided", _describe_fields(invoice))


def emit_written_off(invoice: Invoice, key: str, cents: int) -> None:
    """Emit the event of a write-off, which `key` names in the ledger."""
    payload = _describe_fields(invoice) | {"written_off_cents": cents}
    enqueue(invoice.tenant_id, "invoice.written_off", f"invoice:{key}", payload)


def emit_payment(payment: Payment) -> None:
    """Emit the event of a recorded payment or refund."""
    payload = {
        "payment_id": payment.pk,
        "provider": payment.provider,
        "reference": payment.reference,
        "amount_cents": payment.cents,
        "currency": payment.currency,
        "received_at": payment.received_at.isoformat(),
        "invoice": payment.invoice and payment.invoice.number,
    }
    enqueue(payment.tenant_id, "payment.recorded", f"payment:{payment.pk}", payload)


def _describe_fields(invoice: Invoice) -> dict[str, object]:
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
    }
