"""What tenants' servers are told of invoices, by webhook, in the transaction that changes them."""

from __future__ import annotations

from django.db.models import Max

from billing.models import Invoice, LedgerEntry
from tenants.webhooks.outbox import enqueue


def tell_finalized(invoice: Invoice) -> None:
    """Emit the event of an issued invoice or credit note."""
    kind = "credit_note.finalized" if invoice.gives_back else "invoice.finalized"
    enqueue(invoice.tenant_id, kind, f"invoice:{invoice.pk}:finalized", _described(invoice))


def tell_paid(invoice: Invoice) -> None:
    """Emit the event of a paid invoice, once for each time, since a refund opens it again."""
    entries = LedgerEntry.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice)
    last = entries.aggregate(last=Max("pk"))["last"]
    enqueue(invoice.tenant_id, "invoice.paid", f"invoice:{invoice.pk}:paid:{last}", _described(invoice))


def tell_past_due(invoice: Invoice, number: int, owed_cents: int) -> None:
    """Emit the event of the `number`th reminder."""
    told = _described(invoice) | {"owed_cents": owed_cents, "reminder": number}
    enqueue(invoice.tenant_id, "invoice.past_due", f"invoice:{invoice.pk}:past_due:{number}", told)


def _described(invoice: Invoice) -> dict[str, object]:
    return {
        "invoice_id": invoice.pk,
        "number": invoice.number,
        "kind": invoice.kind,
        "state": invoice.state,
        "period": invoice.period.label,
        "currency": "USD",
        "subtotal_cents": invoice.subtotal,
        "total_cents": invoice.total,
        "issued_at": invoice.issued_at and invoice.issued_at.isoformat(),
        "due_on": invoice.due_on and invoice.due_on.isoformat(),
        "refers_to": invoice.refers_to and invoice.refers_to.number,
    }
