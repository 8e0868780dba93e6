"""The action that finalizes an invoice: number, ledger and PDF. It is safe to run concurrently and after a crash."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from django.db import connection

from billing.actions import credits
from billing.actions.common import booking
from billing.actions.drafts import address, notes_on, returned_credit, rounding, total, zone
from billing.actions.payments import match_deposits, note_balance, outstanding, written_off
from billing.amounts import NANO_A_CENT
from billing.invoicing import document, pdf
from billing.invoicing.lines import lines_of
from billing.invoicing.taxes import NoTaxRule
from billing.invoicing.webhook_events import emit_finalized
from billing.ledger import PostedEntry, post
from billing.models import (
    Account,
    BillingProfile,
    ExchangeRate,
    Invoice,
    InvoiceEmail,
    InvoiceFile,
    InvoiceLine,
)
from tenants import audit
from tenants.actions import Conflict

_NEXT_NUMBER = """
INSERT INTO billing_numberseries (entity_id, prefix, year, last) VALUES (%s, %s, %s, 1)
ON CONFLICT (entity_id, prefix, year) DO UPDATE SET last = billing_numberseries.last + 1 RETURNING last
"""


def do_finalize(invoice: Invoice, now: datetime | None = None) -> Invoice:
    """Give a draft its number, apply credit, book it and store its PDF. It never changes afterwards.

    Raises:
        Conflict: the draft is older than the period's end, or no tax rule matches.
    """
    now = now or datetime.now(UTC)
    with booking(invoice.tenant_id):
        rows = Invoice.objects.for_tenant(invoice.tenant_id).select_related("entity", "period", "tenant", "refers_to")
        row = rows.select_for_update(of=("self",)).filter(pk=invoice.pk).first()
        if row is None:
            raise Conflict("This draft no longer exists.")
        if row.state != Invoice.State.DRAFT:
            return row
        if not row.complete:
            raise Conflict("The period was still open when this draft was created. Close the period and draft again.")
        address(row)
        lines = _with_rounding(row)
        try:
            applied = total(row, lines)
        except NoTaxRule as exc:
            raise Conflict(str(exc)) from exc
        _issue(row, now)
        _fix(row, lines)
        emit_finalized(row)
        credits.apply_credit(row, applied)
        _book(row)
        audit.record("invoice.finalized", row, tenant_id=row.tenant_id, after=audit.serialize_for_audit(row))
        InvoiceEmail.objects.create(invoice=row, tenant_id=row.tenant_id, email_type=InvoiceEmail.EmailType.ISSUED)
    return row


def _with_rounding(invoice: Invoice) -> list[InvoiceLine]:
    """Return the lines of a draft, with the rounding of the invoices that are final now."""
    lines_of(invoice).filter(line_type=InvoiceLine.LineType.ROUNDING).delete()
    lines = list(lines_of(invoice))
    carried = rounding(invoice, lines)
    InvoiceLine.objects.all_tenants().bulk_create(carried)
    return [*lines, *carried]


def _issue(invoice: Invoice, now: datetime) -> None:
    """Set the dates and the display rate, and take the next number. The series is locked from here on."""
    entity, today = invoice.entity, now.astimezone(zone(invoice)).date()
    invoice.issued_at = now
    if not invoice.is_credit_note:
        invoice.due_on = today + timedelta(days=entity.terms_days)
    profile = BillingProfile.objects.for_tenant(invoice.tenant_id).first()
    if profile is not None and profile.currency != "USD":
        rates = ExchangeRate.objects.filter(currency=profile.currency, on__lte=today).order_by("-on")
        if (rate := rates.first()) is not None:
            invoice.display_currency, invoice.display_rate = rate.currency, rate.micro_per_usd
    prefix = entity.credit_note_prefix if invoice.is_credit_note else entity.invoice_prefix
    with connection.cursor() as cursor:
        cursor.execute(_NEXT_NUMBER, [entity.pk, prefix, today.year])
        invoice.number = f"{prefix}-{today.year}-{cursor.fetchone()[0]:06}"


def _fix(invoice: Invoice, lines: list[InvoiceLine]) -> None:
    """Save the final invoice, with its PDF."""
    described = document.described(invoice, lines)
    invoice.sha256 = hashlib.sha256(document.encoded(described)).hexdigest()
    invoice.state = Invoice.State.OPEN
    invoice.save()
    made = pdf.rendered(described)
    InvoiceFile.objects.create(
        invoice=invoice, tenant_id=invoice.tenant_id, pdf=made, sha256=hashlib.sha256(made).hexdigest()
    )


def _book(invoice: Invoice) -> None:
    """Book the invoice in the ledger and match it with deposits."""
    nano = {name: getattr(invoice, name) * NANO_A_CENT for name in ("subtotal", "taxable", "total")}
    tax, key = nano["total"] - nano["taxable"], f"invoice:{invoice.pk}"
    if invoice.is_credit_note:
        _book_note(invoice, nano, tax)
        return
    entries = [
        PostedEntry(Account.RECEIVABLE, nano["total"], invoice.pk),
        PostedEntry(Account.CREDITS, nano["subtotal"] - nano["taxable"], invoice.pk),
        PostedEntry(Account.REVENUE, -nano["subtotal"], invoice.pk),
        PostedEntry(Account.TAX, -tax, invoice.pk),
    ]
    post(invoice.tenant_id, key, entries)
    note_balance(invoice)  # an amount of zero is paid
    match_deposits(invoice.tenant_id)
    invoice.refresh_from_db(fields=["state"])


def _book_note(note: Invoice, nano: dict[str, int], tax: int) -> None:
    """Apply a credit note to its invoice: to its balance, then to its written-off amount; the rest was paid and becomes
    a deposit. Applied credit is returned as credit.
    """
    billed = note.refers_to
    owed = lost = 0
    if billed is not None:
        owed = min(outstanding(billed) * NANO_A_CENT, nano["total"])
        lost = min(written_off(billed), nano["total"] - owed)
    entries = [
        PostedEntry(Account.REVENUE, nano["taxable"], note.pk),
        PostedEntry(Account.TAX, tax, note.pk),
        PostedEntry(Account.RECEIVABLE, -owed, note.refers_to_id),
        PostedEntry(Account.BAD_DEBT, -lost, note.refers_to_id),
        PostedEntry(Account.DEPOSITS, owed + lost - nano["total"]),
    ]
    post(note.tenant_id, f"invoice:{note.pk}", entries)
    note.state = Invoice.State.PAID
    note.save(update_fields=["state"])
    if billed is not None:
        if cents := returned_credit(note):
            before = sum(returned_credit(other) for other in notes_on(billed).exclude(pk=note.pk) if other.number)
            credits.return_credit(billed, cents, before, f"Credit note {note.number}")
        note_balance(billed)
    match_deposits(note.tenant_id)
