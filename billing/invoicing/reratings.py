"""Actions of re-ratings: draft, preview, discard, apply, and the notes of each invoice.

A re-rating is applied to one invoice in one transaction, which also stores that it was. So it can be interrupted, and
continued by any process. `continue_reratings` also finds invoices that become final later with usage in question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import structlog
from django.db import connection, transaction
from django.db.models import Max

from billing.currencies.amounts import femto_a_cent
from billing.invoicing.corrected_prices import RatedDifference, affected_invoices, differences
from billing.invoicing.corrections import amount_line, note_on
from billing.invoicing.drafts import creditable, debits_and_credits, write
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.line_sources import MonthDraft
from billing.invoicing.month_charges import month_charges
from billing.ledger.booking import booking
from billing.metering.archives import require_usage
from billing.models import Invoice, InvoiceLine, Period, PriceBook, ReratedInvoice, Rerating
from billing.rates.price_book import Proposal, parse
from billing.taxes.taxes import compute_tax
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import check
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User

log = structlog.get_logger(__name__)
FINAL = (Invoice.State.OPEN, Invoice.State.PAID, Invoice.State.UNCOLLECTIBLE)
_LOCK = 0x72657261  # an arbitrary advisory lock, used only here
_OPEN_PERIODS = "SELECT id FROM billing_period WHERE entity_id = %s AND closed_at IS NULL ORDER BY id FOR SHARE"


class RerateRow(NamedTuple):
    """The change of one invoice, before it is applied or after."""

    tenant: Tenant
    invoice: Invoice
    subtotal: int  # cents before tax; negative: a credit note
    total: int  # cents with tax, without credit
    difference_femto: int
    note: Invoice | None


@dataclass
class RerateReport:
    """The result of applying re-ratings: the numbers of notes, and what is left with the reason."""

    issued: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def do_propose_rerating(
    proposal: Proposal,
    starts_at: datetime,
    ends_at: datetime,
    *,
    reason: str,
    book: str = PriceBook.LIST,
    tenant: Tenant | None = None,
    created_by: User | None = None,
) -> Rerating:
    """Draft a re-rating of usage that was admitted in a time range, for a second user to apply.

    Raises:
        ActionRefused: the prices, the range or the book are not right.
    """
    body = msgspec.to_builtins(proposal)
    try:
        parse(body)
    except ValueError as exc:
        raise ActionRefused(Text("prices: %(error)s.", error=text_of(exc))) from exc
    if proposal.withdrawn:
        raise ActionRefused(Text("withdrawn: A re-rating corrects prices. Set a price of 0 to charge nothing."))
    if starts_at >= ends_at:
        raise ActionRefused(Text("ends_at: Choose a time after starts_at."))
    if tenant is not None and book != PriceBook.LIST:
        raise ActionRefused(Text("book: Tenant prices cannot be part of another price book."))
    with all_tenants_scope(BypassReason.PRICES):
        chosen = PriceBook.objects.filter(name=book).first()
        if chosen is None:
            raise ActionRefused(Text("book: Price book %(book)s does not exist.", book=repr(book)))
        row = Rerating(
            book=chosen,
            tenant_id=None if tenant is None else tenant.pk,
            body=body,
            starts_at=starts_at,
            ends_at=ends_at,
            reason=reason,
            created_by=created_by,
        )
        check(row)
        row.save(force_insert=True)
        _record("rerating.created", row, None)
    return row


def do_apply_rerating(rerating: Rerating, *, by: User | None) -> Rerating:
    """Mark the draft as applied, so that `continue_reratings` issues its notes. `by` must be another user than the
    author. None: the operator at the machine.

    Raises:
        Conflict: it is no draft any more. ActionRefused: its author wants to apply it.
    """
    with all_tenants_scope(BypassReason.PRICES), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        row = _draft(rerating)
        if by is not None and by.pk == row.created_by_id:
            raise ActionRefused(Text("A re-rating must be applied by someone other than its author."))
        latest: int | None = Rerating.objects.aggregate(latest=Max("number"))["latest"]
        _decide(row, Rerating.State.APPLIED, by, number=(latest or 0) + 1)
    return row


def do_discard_rerating(rerating: Rerating, *, by: User | None) -> Rerating:
    """Discard a draft.

    Raises:
        Conflict: it is no draft any more.
    """
    with all_tenants_scope(BypassReason.PRICES):
        row = _draft(rerating)
        _decide(row, Rerating.State.DISCARDED, by)
    return row


def _draft(rerating: Rerating) -> Rerating:
    row: Rerating = Rerating.objects.select_for_update(of=("self",)).get(pk=rerating.pk)
    if row.state != Rerating.State.DRAFT:
        raise Conflict(Text("This re-rating is already %(state)s.", state=row.state))
    return row


def _decide(row: Rerating, state: Rerating.State, by: User | None, number: int | None = None) -> None:
    before = audit.serialize_for_audit(row)
    row.state, row.decided_by, row.decided_at, row.number = state, by, datetime.now(UTC), number
    row.save()
    _record(f"rerating.{state.value}", row, before)


def _record(action: str, row: Rerating, before: dict[str, object] | None) -> None:
    after = audit.serialize_for_audit(row)
    audit.record(action, row, tenant_id=row.tenant_id, before=before, after=after)


def preview_rerating(rerating: Rerating) -> list[RerateRow]:
    """Return the notes that a draft would issue, or that an applied re-rating issued or has left, by invoice.

    Raises:
        Conflict: usage of an affected invoice is archived.
    """
    with all_tenants_scope(BypassReason.BILLING):
        done = ReratedInvoice.objects.all_tenants().filter(rerating=rerating)
        rows = [_show_issued(row) for row in done.select_related("tenant", "invoice__period", "note")]
        for pk, tenant_id in affected_invoices(rerating):
            with transaction.atomic():
                invoice = _invoice(pk)
                change = _change(rerating, invoice, _find_closed_periods(invoice))
                transaction.set_rollback(True)
            if change.lines:
                rows.append(_show_change(Tenant.objects.all_tenants().get(pk=tenant_id), invoice, change))
    return sorted(rows, key=lambda row: (row.tenant.slug, row.invoice.period.starts_at, row.invoice.pk))


def continue_reratings() -> RerateReport:
    """Issue the notes of all applied re-ratings that are not issued yet, in the order of their numbers.

    An error of one invoice does not stop the others, but it stops later re-ratings of this invoice.
    """
    report = RerateReport()
    with all_tenants_scope(BypassReason.BILLING):
        rows = list(Rerating.objects.filter(state=Rerating.State.APPLIED).order_by("number"))
        waiting = [(row, affected_invoices(row)) for row in rows]
    failed: set[int] = set()
    for rerating, invoices in waiting:
        for pk, tenant_id in invoices:
            if pk in failed:
                continue
            try:
                notes = do_rerate_invoice(rerating, pk, tenant_id)
                report.issued += [str(note) for note in notes]
            except Exception as exc:  # noqa: BLE001  (an error of one invoice must not stop the others)
                failed.add(pk)
                report.left.append(f"invoice {pk} of re-rating {rerating.pk}: {exc}")
                log.error("rerating_failed", rerating=rerating.pk, invoice=pk, error=str(exc))
    return report


def do_rerate_invoice(rerating: Rerating, invoice_id: int, tenant_id: int) -> list[Invoice]:
    """Issue the note of one invoice, unless that was done, and return the notes.

    Raises:
        Conflict: an earlier re-rating has to be applied to the invoice first, or its usage is archived.
    """
    with booking(tenant_id):
        if ReratedInvoice.objects.for_tenant(tenant_id).filter(rerating=rerating, invoice=invoice_id).exists():
            return []
        invoice = _invoice(invoice_id, lock=True)
        if invoice.state not in FINAL:
            return []
        for earlier in Rerating.objects.filter(state=Rerating.State.APPLIED, number__lt=rerating.number):
            if affected_invoices(earlier, invoice_id):
                raise Conflict(
                    Text(
                        "Re-rating %(pk)s must be applied to %(number)s first.",
                        pk=str(earlier.pk),
                        number=invoice.number,
                    )
                )
        closed = _find_closed_periods(invoice)
        change = _change(rerating, invoice, closed)
        notes = []
        if change.note is not None:
            notes = [do_finalize(write(change.note, change.lines)), *_credit_debit_notes(change, invoice, rerating)]
        ReratedInvoice.objects.create(
            rerating=rerating,
            tenant_id=tenant_id,
            invoice=invoice,
            note=notes[0] if notes else None,
            closed_periods=closed,
            rounding_femto=0 if notes else -change.difference_femto,
        )
    return notes


class _Change(NamedTuple):
    """The lines of an invoice's note. `elsewhere`: cents to credit on debit notes of the invoice, by debit note."""

    note: Invoice | None
    lines: list[InvoiceLine]
    difference_femto: int
    elsewhere: list[tuple[Invoice, int]]


def _change(rerating: Rerating, invoice: Invoice, closed: list[int]) -> _Change:
    found = differences(rerating, invoice, closed)
    require_usage(invoice.period_id)
    note, lines = _lines(invoice, found, Invoice.InvoiceType.DEBIT_NOTE, rerating.reason)
    lower = sum(line.cents for line in lines) < 0
    if lower:
        note, lines = _lines(invoice, found, Invoice.InvoiceType.CREDIT_NOTE, rerating.reason)
    amount = sum(line.cents for line in lines)
    femto = sum(-int(line.femto) if lower else int(line.femto) for line in lines)
    elsewhere: list[tuple[Invoice, int]] = []
    excess = amount - creditable(invoice) if lower else 0
    for debit in _debit_notes(invoice) if excess > 0 else ():
        part = min(excess, creditable(debit))
        if part > 0:
            elsewhere.append((debit, part))
            lines.append(amount_line(note, f"Credited on debit note {debit.number}", -part))
            excess -= part
    return _Change(note if amount else None, lines, femto, elsewhere)


def _lines(
    invoice: Invoice, found: list[RatedDifference], note_type: Invoice.InvoiceType, reason: str
) -> tuple[Invoice, list[InvoiceLine]]:
    note = note_on(invoice, note_type, reason)
    return note, month_charges(MonthDraft(note, differences=found))


def _credit_debit_notes(change: _Change, invoice: Invoice, rerating: Rerating) -> list[Invoice]:
    notes = []
    for debit, part in change.elsewhere:
        note = note_on(debit, Invoice.InvoiceType.CREDIT_NOTE, rerating.reason)
        line = amount_line(note, f"Correction of prices of invoice {invoice.number}", part)
        notes.append(do_finalize(write(note, [line])))
    return notes


def _debit_notes(invoice: Invoice) -> list[Invoice]:
    rows = debits_and_credits(invoice).filter(invoice_type=Invoice.InvoiceType.DEBIT_NOTE, state__in=FINAL)
    return list(rows.select_related("entity", "period", "tenant").order_by("-pk"))


def _invoice(pk: int, *, lock: bool = False) -> Invoice:
    rows = Invoice.objects.all_tenants().select_related("entity", "period", "tenant")
    if lock:
        rows = rows.select_for_update(of=("self",))
    invoice: Invoice = rows.get(pk=pk)
    return invoice


def _find_closed_periods(invoice: Invoice) -> list[int]:
    """Return the closed billing periods that may have adjustments of the invoice's usage. Open ones remain open until
    the end of the transaction.
    """
    with connection.cursor() as cursor:
        cursor.execute(_OPEN_PERIODS, [invoice.entity_id])
    closed = Period.objects.filter(entity=invoice.entity_id, closed_at__isnull=False)
    later = closed.filter(ends_at__gte=invoice.period.ends_at).order_by("pk")
    return list(later.values_list("pk", flat=True))


def _show_change(tenant: Tenant, invoice: Invoice, change: _Change) -> RerateRow:
    amount = sum(line.cents for line in change.lines) + sum(part for _, part in change.elsewhere)
    taxes = [
        compute_tax({name: tax[name] for name in tax if name not in ("base", "tax")}, amount) for tax in invoice.taxes
    ]
    sign = -1 if change.note is not None and change.note.is_credit_note else 1
    total = amount + sum(tax["tax"] for tax in taxes)
    return RerateRow(tenant, invoice, sign * amount, sign * total, change.difference_femto, None)


def _show_issued(row: ReratedInvoice) -> RerateRow:
    note = row.note
    if note is None:
        return RerateRow(row.tenant, row.invoice, 0, 0, -int(row.rounding_femto), None)
    sign = -1 if note.is_credit_note else 1
    femto = sign * (note.subtotal * femto_a_cent(note.currency) - int(note.rounding_femto))
    return RerateRow(row.tenant, row.invoice, sign * note.subtotal, sign * note.total, femto, note)
