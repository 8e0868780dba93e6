"""Actions that close a billing period and draft its invoices. They are safe to run concurrently and after a crash."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import structlog
from django.db import connection
from django.db.models import Q, QuerySet

from billing.currencies.amounts import femto_a_cent
from billing.invoicing.line_sources import BilledMonth, MonthDraft, read_month
from billing.invoicing.lines import Count, lines_of
from billing.invoicing.metered_lines import reversed_metered
from billing.invoicing.month_charges import changes_balance, find_billed, month_charges, store_lines
from billing.ledger import credits
from billing.ledger.booking import booking
from billing.metering.archives import require_usage
from billing.models import (
    ADDRESS,
    Adjustment,
    BillingEntity,
    BillingProfile,
    CreditGrant,
    Invoice,
    InvoiceLine,
    Period,
    ReratedInvoice,
)
from billing.periods import close_after
from billing.pricing.currencies import currency_of
from billing.reservations.reservations import open_before
from billing.taxes.taxes import NoTaxRule, compute_tax, tax_for, vat_party
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant

log = structlog.get_logger(__name__)
RETURNED_CREDIT = "Returned as credit"


def do_close_period(period: Period, now: datetime | None = None) -> bool:
    """Close a billing period. Later usage goes to the next one. Return False if it was closed before.

    Raises:
        Conflict: it is not over, or requests admitted in it still run.
    """
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        row = Period.objects.select_for_update().get(pk=period.pk)
        if row.closed_at is not None:
            return False
        if row.ends_at > now:
            raise Conflict(Text("The period %(label)s is not over.", label=row.label))
        if row.ends_at + close_after() > now:
            raise Conflict(
                Text(
                    "Requests admitted in %(label)s may still run. Try again %(close_after)s after its end.",
                    label=row.label,
                    close_after=close_after(),
                )
            )
        with connection.cursor() as cursor:
            if running := open_before(cursor, row.ends_at):
                raise Conflict(
                    Text(
                        "Requests admitted in %(label)s may still run: %(running)s reservations are open.",
                        label=row.label,
                        running=running,
                    )
                )
        row.closed_at = now
        row.save(update_fields=["closed_at"])
        audit.record("period.closed", row, tenant_id=None, after={"label": row.label, "entity": row.entity_id})
    log.info("period_closed", entity=row.entity_id, label=row.label)
    return True


def do_draft(
    period: Period, tenant: Tenant | None = None, on_error: Callable[[Tenant, Exception], None] | None = None
) -> list[Invoice]:
    """Draft the period's invoices and corrections again, for one tenant or all. Final ones do not change.

    Args:
        on_error: receives the error of a tenant, which then does not stop the others.

    Raises:
        Conflict: usage of the period is archived.
    """
    with all_tenants_scope(BypassReason.BILLING):
        # NOTE: the period first: once it is closed, all events of the period are visible below.
        period = Period.objects.select_related("entity").get(pk=period.pk)
        month = read_month(period, None if tenant is None else tenant.pk)
        require_usage(period.pk)
        tenants = find_billed(month, tenant)
    found = []
    for row in tenants:
        try:
            found += _draft(month, row.pk)
        except Exception as exc:
            if on_error is None:
                raise
            on_error(row, exc)
    return found


def _draft(month: BilledMonth, tenant_id: int) -> list[Invoice]:
    """Return a tenant's drafts: the invoice, and a correction of each invoice whose usage was reversed."""
    with booking(tenant_id) as tenant:
        invoice = _draft_document(month, tenant, Invoice.InvoiceType.INVOICE)
        return [*([] if invoice is None else [invoice]), *_draft_corrections(month, tenant)]


def _draft_document(
    month: BilledMonth, tenant: Tenant, invoice_type: Invoice.InvoiceType, corrected: Invoice | None = None
) -> Invoice | None:
    """Return the draft of a document. None: it is final, or there is nothing to bill.

    A correction that changes no cent has no document. Later notes on its invoice include the reversed usage.
    """
    document = _blank(month.period, tenant, invoice_type, corrected)
    if document is None:
        return None
    lines = month_charges(fill_draft(document, month))
    if changes_balance(document, lines):
        if any(line.line_type == InvoiceLine.LineType.COMMITMENT for line in lines):
            credits.grant_commitments(month.period, tenant.pk)
        return write(document, lines)
    if document.pk is not None:
        document.delete()
    if corrected is not None and lines and document.complete:
        carried = sum(int(line.femto) for line in lines)
        ReratedInvoice.objects.create(
            tenant=tenant, invoice=corrected, closed_periods=[month.period.pk], rounding_femto=carried
        )
    return None


def fill_draft(invoice: Invoice, month: BilledMonth) -> MonthDraft:
    """Return the draft of a document with the usage of a month."""
    if invoice.invoice_type == Invoice.InvoiceType.INVOICE:
        count = month.counts.get(invoice.tenant_id, Count())
        invoice.events, invoice.saved_femto = count.events, max(0, count.saved)
        invoice.usage_labels = month.labels.get(invoice.tenant_id)
    return MonthDraft(invoice, month.usage.get(invoice.tenant_id, []))


def _draft_corrections(month: BilledMonth, tenant: Tenant) -> list[Invoice]:
    """Return a draft for each invoice that billed some of the usage."""
    notes = [
        _draft_document(month, tenant, Invoice.InvoiceType.CORRECTION, invoice)
        for invoice in find_corrected(month, tenant)
    ]
    return [note for note in notes if note is not None]


def find_corrected(month: BilledMonth, tenant: Tenant) -> list[Invoice]:
    """Return each invoice that billed some of the usage. Usage that no invoice billed is not credited."""
    back = [use for use in month.usage.get(tenant.pk, []) if use.femto < 0]
    metered = month.reversed_metered.get(tenant.pk, [])
    if not back and not metered:
        return []
    billed = Invoice.objects.for_tenant(tenant).filter(
        Q(period__in=[*metered, *(use.billed_period for use in back)])
        | Q(period__label__in=[use.usage_month for use in back]),
        invoice_type=Invoice.InvoiceType.INVOICE,
        period__ends_at__lt=month.period.ends_at,
    )
    absorbed = ReratedInvoice.objects.for_tenant(tenant).filter(rerating=None, closed_periods=[month.period.pk])
    return list(
        billed.exclude(pk__in=absorbed.values("invoice"))
        .exclude(state__in=[Invoice.State.DRAFT, Invoice.State.VOID])
        .order_by("period__starts_at")
    )


def waits_for_drafts(period: Period) -> bool:
    """Return whether usage reversed in the period may be on earlier drafts: its corrections follow their invoices."""
    with all_tenants_scope(BypassReason.BILLING):
        drafts = Invoice.objects.all_tenants().filter(
            state=Invoice.State.DRAFT, invoice_type=Invoice.InvoiceType.INVOICE, period__ends_at__lt=period.ends_at
        )
        adjusted = Adjustment.objects.all_tenants().filter(invoice_period=period.pk, cost_femto__lt=0)
        return any(
            rows.filter(tenant_id__in=drafts.values("tenant_id")).exists()
            for rows in (adjusted, reversed_metered(period))
        )


def _blank(
    period: Period, tenant: Tenant, invoice_type: Invoice.InvoiceType, corrected: Invoice | None = None
) -> Invoice | None:
    """Return the draft of this type to fill. None: there is a final document that was not voided."""
    documents = Invoice.objects.for_tenant(tenant).filter(period=period, invoice_type=invoice_type)
    newest = documents.filter(refers_to=corrected).order_by("-revision").first()
    if newest is not None and newest.state == Invoice.State.DRAFT:
        draft = newest
        lines_of(draft).delete()
    elif newest is None or newest.state == Invoice.State.VOID:
        is_first = newest is None and corrected is None
        draft = Invoice(
            tenant=tenant,
            entity=period.entity,
            period=period,
            invoice_type=invoice_type,
            revision=1 if is_first else documents.count() + 1,
            refers_to=corrected,
            reason="" if corrected is None else "Corrections to invoiced usage",
            replaces=find_cancelled(newest),
            currency=currency_of(tenant.pk),
        )
    else:
        return None
    draft.period, draft.complete = period, period.closed_at is not None
    return draft


def find_cancelled(voided: Invoice | None) -> Invoice | None:
    """Return the voided invoice if it has a cancellation. Invoices that an earlier release voided have none."""
    if voided is None:
        return None
    notes = debits_and_credits(voided).filter(invoice_type=Invoice.InvoiceType.CANCELLATION)
    return voided if notes.exists() else None


def write(invoice: Invoice, lines: list[InvoiceLine]) -> Invoice:
    """Store a draft with its lines and totals."""
    address(invoice)
    with suppress(NoTaxRule):  # a draft may lack it; finalizing then fails
        total(invoice, lines)
    invoice.save()
    store_lines(lines)
    return invoice


def address(invoice: Invoice) -> BillingProfile | None:
    """Store the current addresses of seller and buyer. Return the buyer's billing profile.

    A note has the VAT IDs of its invoice.
    """
    entity = invoice.entity
    invoice.seller = entity.seller()
    profile = BillingProfile.objects.for_tenant(invoice.tenant_id).first()
    invoice.buyer = buyer_of(invoice.tenant, profile, entity)
    for party, billed in note_parties(invoice):
        party["vat_id"] = vat_party(party, billed)["vat_id"]
    return profile


def buyer_of(tenant: Tenant, profile: BillingProfile | None, entity: BillingEntity) -> dict[str, str]:
    """Return the current buyer: that of the billing profile, or else the tenant in the entity's country."""
    if profile is not None:
        return profile.buyer()
    nowhere = dict.fromkeys(ADDRESS, "")
    return {**nowhere, "name": _tenant_name(tenant), "country": entity.country, "po_number": ""}


def note_parties(invoice: Invoice) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return seller and buyer of a note, each with the party on its invoice. Other documents have none."""
    billed = invoice.refers_to
    return [] if billed is None else [(invoice.seller, billed.seller), (invoice.buyer, billed.buyer)]


def _tenant_name(tenant: Tenant) -> str:
    """Return the name of a tenant. A purged tenant is invoiced with the name that it had, from the audit log."""
    if tenant.status != Tenant.Status.PURGED:
        return tenant.name
    purges = AuditEntry.objects.for_tenant(tenant).filter(action="tenant.purged", object_id=tenant.pk)
    entry = purges.order_by("-pk").first()
    return str(((entry and entry.before) or {}).get("name", tenant.name))


def total(invoice: Invoice, lines: list[InvoiceLine], grants: list[Any] | None = None) -> list[tuple[CreditGrant, int]]:
    """Compute the totals from the lines. Return the credit to apply, from `grants` or from all usable grants.

    Prepaid credit that is not taxed yet pays the total with tax. Other credit is deducted before tax, from usage only.
    A purchase has its tax already. A cancellation has the totals of its invoice.

    Raises:
        NoTaxRule: no tax rule matches the buyer.
    """
    kinds = InvoiceLine.LineType
    of_usage = (kinds.USAGE, kinds.METERED, kinds.TERM, kinds.ROUNDING)
    use = sum(line.cents for line in lines if line.line_type in of_usage)
    invoice.subtotal = sum(line.cents for line in lines)
    unit = femto_a_cent(invoice.currency)
    invoice.rounding_femto = sum(line.cents * unit - int(line.femto) for line in lines)
    if (cancelled := invoice.cancels) is not None:
        for name in ("credits", "taxable", "taxes", "total", "prepaid"):
            setattr(invoice, name, getattr(cancelled, name))
        return []
    applied: list[tuple[CreditGrant, int]] = []
    payments: list[Any] = []
    if invoice.is_credit_note:
        invoice.taxable, invoice.taxes = _given_back(invoice)
        rest = invoice.subtotal - invoice.taxable
        returned = min(rest, _credit_left(invoice))
        shares = ((RETURNED_CREDIT, returned), ("Credited before", rest - returned))
        invoice.credits = [{"label": label, "cents": cents} for label, cents in shares if cents]
    elif invoice.invoice_type == Invoice.InvoiceType.PURCHASE:
        invoice.taxable = invoice.subtotal
    else:
        usable = credits.usable(invoice.tenant_id, invoice.period) if grants is None else grants
        payments = [grant for grant in usable if grant.is_payment]
        applied = credits.applied_credit([grant for grant in usable if not grant.is_payment], use, invoice.currency)
        invoice.credits = [_deduct_credit(grant, cents) for grant, cents in applied]
        invoice.taxable = invoice.subtotal - sum(cents for _, cents in applied)
        invoice.taxes = [compute_tax(_rule(invoice), invoice.taxable)]
    invoice.total = invoice.taxable + sum(tax["tax"] for tax in invoice.taxes)
    if invoice.invoice_type == Invoice.InvoiceType.PURCHASE:
        invoice.prepaid = invoice.total
        return []
    paid = credits.applied_credit(payments, invoice.total, invoice.currency)
    invoice.prepaid = sum(cents for _, cents in paid)
    return [*applied, *paid]


def _deduct_credit(grant: CreditGrant, cents: int) -> dict[str, Any]:
    """Return credit that is deducted before tax, with the number of the purchase that was taxed."""
    if grant.purchase is None:
        return {"label": str(grant), "cents": cents}
    label = f"Prepaid credit, taxed on {grant.purchase.number}"
    return {"label": label, "cents": cents, "taxed_on": grant.purchase.number}


def _given_back(note: Invoice) -> tuple[int, list[dict[str, Any]]]:
    """Return of a credit note the part that was charged in money, and its taxes.

    The last credit note on an invoice returns the rest of its tax, so that together they return all of it.
    """
    billed = note.refers_to
    if billed is None:
        return 0, [compute_tax(_rule(note), 0)]
    earlier = _earlier_notes(note)
    left = billed.taxable - sum(other.taxable for other in earlier)
    base = min(note.subtotal, left)
    taxes = []
    for index, tax in enumerate(billed.taxes):
        share = compute_tax({name: tax[name] for name in ("category", "rate_ppm", "label", "note")}, base)
        if base == left:
            share["tax"] = tax["tax"] - sum(other.taxes[index]["tax"] for other in earlier)
        taxes.append(share)
    return base, taxes


def _credit_left(note: Invoice) -> int:
    """Return the cents of credit that were applied to the note's invoice and not returned by earlier notes."""
    if note.refers_to is None:
        return 0
    applied: int = sum(credit["cents"] for credit in note.refers_to.credits)
    return max(0, applied - sum(returned_credit(other) for other in _earlier_notes(note)))


def returned_credit(note: Invoice) -> int:
    """Return the cents that a credit note returns as credit."""
    return sum(item["cents"] for item in note.credits if item["label"] == RETURNED_CREDIT)


def _earlier_notes(note: Invoice) -> list[Invoice]:
    if note.refers_to is None:
        return []
    return list(notes_on(note.refers_to).exclude(state=Invoice.State.DRAFT).exclude(pk=note.pk))


def notes_on(invoice: Invoice) -> QuerySet[Invoice]:
    """Return the credit notes on an invoice."""
    return debits_and_credits(invoice).exclude(invoice_type=Invoice.InvoiceType.DEBIT_NOTE)


def debits_and_credits(invoice: Invoice) -> QuerySet[Invoice]:
    """Return the credit notes and debit notes on an invoice."""
    return Invoice.objects.for_tenant(invoice.tenant_id).filter(refers_to=invoice)


def creditable(invoice: Invoice) -> int:
    """Return the cents before tax of a final invoice that credit notes have not returned yet."""
    note = Invoice(tenant_id=invoice.tenant_id, refers_to=invoice, invoice_type=Invoice.InvoiceType.CREDIT_NOTE)
    money = invoice.taxable - sum(other.taxable for other in _earlier_notes(note))
    return money + _credit_left(note)


def _rule(invoice: Invoice) -> dict[str, Any]:
    if invoice.refers_to is not None:  # a debit note has the tax of its invoice
        (tax,) = invoice.refers_to.taxes
        return {name: tax[name] for name in ("category", "rate_ppm", "label", "note")}
    last_day = (invoice.period.ends_at - timedelta(microseconds=1)).astimezone(zone(invoice)).date()
    return tax_for(invoice.entity_id, invoice.seller, invoice.buyer, last_day)


def zone(invoice: Invoice) -> ZoneInfo:
    return ZoneInfo(invoice.entity.time_zone)
