"""The action that finalizes an invoice: number and ledger. It is safe to run concurrently and after a crash."""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime, timedelta

from django.db import connection
from django.db.models import Q

from billing.currencies.amounts import DEFAULT_CURRENCY, minor_digits, nano_a_cent
from billing.invoicing import document
from billing.invoicing.drafts import (
    address,
    note_parties,
    notes_on,
    returned_credit,
    total,
    zone,
)
from billing.invoicing.month_charges import MONTHLY, changes_balance, mark_billed, renew_charges
from billing.invoicing.tax_rates import find_tax_rate, require_one_currency
from billing.ledger import credits
from billing.ledger.bad_debts import reduce_loss, written_off
from billing.ledger.booking import booking
from billing.ledger.ledger import PostedEntry, post
from billing.ledger.matching import match_deposits, note_balance, sum_outstanding
from billing.ledger.webhook_events import emit_finalized
from billing.models import (
    Account,
    Adjustment,
    BillingProfile,
    Invoice,
    InvoiceEmail,
    InvoiceLine,
    LedgerEntry,
    MeteredUsage,
    Period,
    TaxCategory,
)
from billing.pricing.currencies import CrossRate, dated_rate
from billing.taxes.taxes import NoTaxRule, require_vat_ids, vat_party
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions import Conflict

_NEXT_NUMBER = """
INSERT INTO billing_numberseries (entity_id, prefix, year, last) VALUES (%s, %s, %s, 1)
ON CONFLICT (entity_id, prefix, year) DO UPDATE SET last = billing_numberseries.last + 1 RETURNING last
"""


def do_finalize(invoice: Invoice, now: datetime | None = None) -> Invoice:
    """Give a draft its number, apply credit, and book it. It never changes afterwards. Its PDF is typeset later.

    Raises:
        Conflict: the draft is older than the period's end, or no tax rule or exchange rate matches, or a VAT ID is
                missing.
    """
    now = now or datetime.now(UTC)
    with booking(invoice.tenant_id):
        rows = Invoice.objects.for_tenant(invoice.tenant_id).select_related("entity", "period", "tenant", "refers_to")
        row = rows.select_for_update(of=("self",)).filter(pk=invoice.pk).first()
        if row is None:
            raise Conflict(Text("This draft no longer exists."))
        if row.state != Invoice.State.DRAFT:
            return row
        if not row.complete:
            raise Conflict(
                Text("The period was still open when this draft was created. Close the period and draft again.")
            )
        profile = address(row)
        charged = renew_charges(row)
        lines = charged.lines
        if row.invoice_type in MONTHLY and not changes_balance(row, lines):
            raise Conflict(Text("This draft has no amount any more. Draft the month again."))
        require_one_currency(row, {line.price_id for line in lines if line.price_id is not None})
        try:
            applied = total(row, lines)
            _require_vat_ids(row)
        except NoTaxRule as exc:
            raise Conflict(text_of(exc)) from exc
        _issue(row, now, profile)
        _fix(row, lines)
        mark_billed(charged)
        emit_finalized(row)
        credits.apply_credit(row, applied)
        _book(row)
        _reopen_later_months(row)
        audit.record("invoice.finalized", row, tenant_id=row.tenant_id, after=audit.serialize_for_audit(row))
        InvoiceEmail.objects.create(invoice=row, tenant_id=row.tenant_id, email_type=InvoiceEmail.EmailType.ISSUED)
    return row


def _require_vat_ids(invoice: Invoice) -> None:
    """Check that a note is valid with the tax of its invoice. Other documents were checked with their tax rule.

    Raises:
        NoTaxRule: a VAT ID is missing.
    """
    if parties := [vat_party(*pair) for pair in note_parties(invoice)]:
        for tax in invoice.taxes:
            require_vat_ids(TaxCategory(tax["category"]), *parties)


def _reopen_later_months(invoice: Invoice) -> None:
    """Let the next run draft corrections of usage that was reversed while the invoice's month was void."""
    if invoice.invoice_type != Invoice.InvoiceType.INVOICE or invoice.revision == 1:
        return
    adjusted = Adjustment.objects.for_tenant(invoice.tenant_id).filter(cost_femto__lt=0).values("invoice_period")
    metered = MeteredUsage.objects.for_tenant(invoice.tenant_id).exclude(reverses=None).values("invoice_period")
    later = Period.objects.filter(entity=invoice.entity_id, starts_at__gte=invoice.period.ends_at)
    later = later.filter(Q(pk__in=adjusted) | Q(pk__in=metered))
    later.update(invoiced_at=None)


def _issue(invoice: Invoice, now: datetime, profile: BillingProfile | None) -> None:
    """Set the dates and the display rate, and take the next number. The series is locked from here on."""
    entity, today = invoice.entity, now.astimezone(zone(invoice)).date()
    invoice.issued_at, invoice.format_version = now, document.FORMAT_VERSION
    if not invoice.is_credit_note:
        invoice.due_on = today if invoice.sells_credit else today + timedelta(days=entity.terms_days)
    _set_tax_currency(invoice, today)
    if profile is not None and profile.currency not in (DEFAULT_CURRENCY, invoice.currency):
        digits = None if invoice.tax_rate is None else invoice.rate_digits
        shown = dated_rate(invoice.currency, profile.currency, today, digits)
        if shown is not None:
            invoice.display_currency, invoice.display_rate_on = profile.currency, shown.on
            invoice.display_rate, invoice.rate_digits = shown.rate
            invoice.display_digits = minor_digits(profile.currency)
    prefix = entity.credit_note_prefix if invoice.is_credit_note else entity.invoice_prefix
    with connection.cursor() as cursor:
        cursor.execute(_NEXT_NUMBER, [entity.pk, prefix, today.year])
        invoice.number = f"{prefix}-{today.year}-{cursor.fetchone()[0]:06}"


def _set_tax_currency(invoice: Invoice, today: date) -> None:
    """Set the rate of the entity's tax currency, and the tax in it: of a note, at the rate of its invoice.

    The credit notes on an invoice together return its tax in both currencies exactly.

    Raises:
        Conflict: there is no rate, or it is too old.
    """
    billed = invoice.refers_to
    if billed is not None:
        invoice.tax_currency, invoice.tax_rate = billed.tax_currency, billed.tax_rate
        invoice.rate_digits, invoice.tax_digits = billed.rate_digits, billed.tax_digits
        invoice.tax_rate_on = billed.tax_rate_on
    elif (found := find_tax_rate(invoice.entity, invoice.currency, invoice.taxes, today)) is not None:
        invoice.tax_currency, invoice.tax_rate_on = invoice.entity.tax_currency, found.on
        invoice.tax_rate, invoice.rate_digits = found.rate
        invoice.tax_digits = minor_digits(invoice.tax_currency)
    if invoice.tax_rate is not None:
        before = 0
        if billed is not None and invoice.is_credit_note:
            before = sum(tax["tax"] for note in _earlier_notes(invoice, billed) for tax in note.taxes)
        after = before + sum(tax["tax"] for tax in invoice.taxes)
        rate = CrossRate(invoice.tax_rate, invoice.rate_digits)
        more = invoice.tax_digits - minor_digits(invoice.currency)
        invoice.converted_tax = rate.convert(after, more) - rate.convert(before, more)


def _fix(invoice: Invoice, lines: list[InvoiceLine]) -> None:
    """Save the final invoice."""
    described = document.describe_invoice(invoice, lines)
    invoice.sha256 = hashlib.sha256(document.encode_document(described)).hexdigest()
    invoice.state = Invoice.State.OPEN
    invoice.save()


def _book(invoice: Invoice) -> None:
    """Book the invoice in the ledger and match it with deposits."""
    unit = nano_a_cent(invoice.currency)
    nano = {name: getattr(invoice, name) * unit for name in ("subtotal", "taxable", "total", "prepaid")}
    tax, key = nano["total"] - nano["taxable"], f"invoice:{invoice.pk}"
    if (cancelled := invoice.cancels) is not None:
        _book_cancellation(invoice, cancelled)
        return
    if invoice.is_credit_note:
        _book_note(invoice, nano, tax)
        return
    if invoice.sells_credit:
        entries = [
            PostedEntry(Account.RECEIVABLE, nano["total"], invoice.pk),
            PostedEntry(Account.CREDITS, -nano["subtotal"], invoice.pk),
            PostedEntry(Account.TAX, -tax, invoice.pk),
        ]
    else:
        entries = [
            PostedEntry(Account.RECEIVABLE, nano["total"] - nano["prepaid"], invoice.pk),
            PostedEntry(Account.CREDITS, nano["subtotal"] - nano["taxable"] + nano["prepaid"], invoice.pk),
            PostedEntry(Account.REVENUE, -nano["subtotal"], invoice.pk),
            PostedEntry(Account.TAX, -tax, invoice.pk),
        ]
    post(invoice.tenant_id, key, entries, invoice.currency)
    if entries[0].nano == 0:
        note_balance(invoice)  # nothing is outstanding: it is paid
    if match_deposits(invoice.tenant_id, invoice.pk if invoice.sells_credit else None):
        invoice.refresh_from_db(fields=["state"])


def _book_cancellation(note: Invoice, cancelled: Invoice) -> None:
    """Reverse the entries of the cancelled document. Its receivable is settled, and the rest belongs to the note."""
    booked = LedgerEntry.objects.for_tenant(note.tenant_id).filter(transaction__key=f"invoice:{cancelled.pk}")
    entries = [
        PostedEntry(
            Account(entry.account), -entry.nano, cancelled.pk if entry.account == Account.RECEIVABLE else note.pk
        )
        for entry in booked.order_by("pk")
    ]
    post(note.tenant_id, f"invoice:{note.pk}", entries, note.currency)
    note.state = Invoice.State.PAID
    note.save(update_fields=["state"])


def _book_note(note: Invoice, nano: dict[str, int], tax: int) -> None:
    """Apply a credit note to its invoice: to its balance, then to its written-off amount; the rest was paid.

    What was paid in money becomes a deposit. What prepaid credit paid, and credit that was deducted before tax, is
    returned as credit.
    """
    billed = note.refers_to
    unit = nano_a_cent(note.currency)
    owed = lost = before = returned = 0
    earlier = [] if billed is None else _earlier_notes(note, billed)
    if billed is not None:
        before, returned = _returned_prepaid(billed, sum(other.total for other in earlier), note.total)
        owed = min(sum_outstanding(billed) * unit, nano["total"] - returned * unit)
        lost = min(written_off(billed), nano["total"] - returned * unit - owed)
    entries = [
        PostedEntry(Account.CREDITS if note.sells_credit else Account.REVENUE, nano["taxable"], note.pk),
        PostedEntry(Account.TAX, tax, note.pk),
        PostedEntry(Account.RECEIVABLE, -owed, note.refers_to_id),
        *([] if billed is None else reduce_loss(billed, lost)),
        PostedEntry(Account.DEPOSITS, owed + lost - nano["total"]),
    ]
    post(note.tenant_id, f"invoice:{note.pk}", entries, note.currency)
    note.state = Invoice.State.PAID
    note.save(update_fields=["state"])
    if billed is not None:
        label = f"Credit note {note.number}"
        if returned:
            credits.return_credit(billed, returned, before, label, paid=True)
        if cents := returned_credit(note):
            credits.return_credit(billed, cents, sum(returned_credit(other) for other in earlier), label)
        note_balance(billed)
    match_deposits(note.tenant_id)


def _earlier_notes(note: Invoice, billed: Invoice) -> list[Invoice]:
    """Return the other credit notes that were issued. A correction may be older as a draft and issued later."""
    return list(notes_on(billed).filter(number__isnull=False).exclude(pk=note.pk).order_by("pk"))


def _returned_prepaid(billed: Invoice, earlier: int, cents: int) -> tuple[int, int]:
    """Return the prepaid credit that credit notes of `earlier` cents returned, and that one of `cents` returns.

    Money is returned first.
    """
    if billed.sells_credit:
        return 0, 0
    money = billed.total - billed.prepaid
    before = max(0, earlier - money)
    return before, max(0, earlier + cents - money) - before
