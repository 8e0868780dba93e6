"""Verbs on invoices: close a period, draft, finalise, correct. Each may run twice at once, and be killed at any line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import structlog
from django.db import connection

from billing.actions import credits
from billing.actions.common import booking
from billing.actions.payments import match_deposits, note_balance, outstanding
from billing.amounts import FEMTO_A_CENT, NANO_A_CENT, dollars
from billing.invoicing import document, pdf
from billing.invoicing.lines import Use, counted, line, used
from billing.invoicing.taxes import NoTaxRule, tax_for, taxed
from billing.ledger import Entry, post
from billing.models import (
    ADDRESS,
    Account,
    BillingProfile,
    Commitment,
    CreditGrant,
    ExchangeRate,
    Invoice,
    InvoiceFile,
    InvoiceLine,
    InvoiceMail,
    LedgerEntry,
    Period,
)
from billing.periods import default_entity
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.models import Tenant
from tenants.roles import SystemUse
from tenants.scoping import system

log = structlog.get_logger(__name__)
CLOSE_AFTER = timedelta(minutes=10)  # usage on its way at the period's end is still in time
_NEXT_NUMBER = """
INSERT INTO billing_numberseries (entity_id, prefix, year, last) VALUES (%s, %s, %s, 1)
ON CONFLICT (entity_id, prefix, year) DO UPDATE SET last = billing_numberseries.last + 1 RETURNING last
"""


def do_close_period(period: Period, now: datetime | None = None) -> bool:
    """Let nothing more into the period; what comes later goes to the next. False if it was closed before.

    Raises:
        Conflict: it is not over, or requests admitted in it still run.
    """
    now = now or datetime.now(UTC)
    with system(SystemUse.BILLING):
        row = Period.objects.select_for_update().get(pk=period.pk)
        if row.closed_at is not None:
            return False
        if row.ends_at > now:
            raise Conflict(f"The period {row.label} is not over.")
        row.closed_at = now
        row.save(update_fields=["closed_at"])
        audit.record("period.close", row, tenant_id=None, after={"label": row.label, "entity": row.entity_id})
    log.info("period_closed", entity=row.entity_id, label=row.label)
    return True


def do_draft(period: Period, tenant: Tenant | None = None) -> list[Invoice]:
    """Draft the period's invoices and corrections anew, for one tenant or all; what is finalised stays as it is."""
    only = None if tenant is None else tenant.pk
    with system(SystemUse.BILLING):
        # NOTE: the period first: if it is closed, all events that bear its stamp are seen below.
        period = Period.objects.select_related("entity").get(pk=period.pk)
        uses, events = used(period, only), counted(period, only)
        due = [*uses, *_committed(period, only)]
        tenants = list(Tenant.objects.all_tenants().filter(pk__in=due).order_by("pk").values_list("pk", flat=True))
    drafts = (_draft(period, pk, uses.get(pk, []), events.get(pk, 0)) for pk in tenants)
    return [invoice for found in drafts for invoice in found]


def _committed(period: Period, tenant_id: int | None) -> list[int]:
    """Tenants with commitments whom this period's entity bills."""
    tenants = set(credits.committed(period, tenant_id).values_list("tenant_id", flat=True))
    others = dict(BillingProfile.objects.all_tenants().filter(tenant__in=tenants).values_list("tenant_id", "entity_id"))
    default = default_entity().pk
    return [pk for pk in tenants if others.get(pk, default) == period.entity_id]


def _draft(period: Period, tenant_id: int, uses: list[Use], events: int) -> list[Invoice]:
    """A tenant's drafts: the invoice, and a correction if something is given back."""
    found = []
    with booking(tenant_id) as tenant:
        commitments = credits.grant_commitments(period, tenant_id)
        taken = [use for use in uses if use.femto >= 0]
        back = [use for use in uses if use.femto < 0]
        if (taken or commitments) and (invoice := _blank(period, tenant, Invoice.Kind.INVOICE)):
            invoice.events = events
            lines = [line(invoice, number, use) for number, use in enumerate(taken, 1)]
            lines += [_fee(invoice, number, each) for number, each in enumerate(commitments, len(lines) + 1)]
            found.append(_write(invoice, lines))
        if back and (note := _blank(period, tenant, Invoice.Kind.CORRECTION)):
            note.reason = "Usage corrected after it was invoiced"
            note.refers_to = _standing(tenant_id, max(use.late_from for use in back))
            found.append(_write(note, [line(note, number, use) for number, use in enumerate(back, 1)]))
    return found


def _blank(period: Period, tenant: Tenant, kind: Invoice.Kind) -> Invoice | None:
    """The draft of this kind to fill; None if there is a finalised one that stands."""
    newest = Invoice.objects.for_tenant(tenant).filter(period=period, kind=kind).order_by("-revision").first()
    if newest is not None and newest.state == Invoice.State.DRAFT:
        draft = newest
        draft.lines.all().delete()
    elif newest is None or newest.state == Invoice.State.VOID:
        revision = 1 if newest is None else newest.revision + 1
        draft = Invoice(tenant=tenant, entity=period.entity, period=period, kind=kind, revision=revision)
    else:
        return None
    draft.period, draft.complete = period, period.closed_at is not None
    return draft


def _standing(tenant_id: int, month: str) -> Invoice | None:
    """The invoice of that month."""
    rows = Invoice.objects.for_tenant(tenant_id).filter(kind=Invoice.Kind.INVOICE, period__label=month)
    return rows.exclude(state__in=[Invoice.State.DRAFT, Invoice.State.VOID]).first()


def _fee(invoice: Invoice, position: int, commitment: Commitment) -> InvoiceLine:
    return InvoiceLine(
        invoice=invoice,
        tenant_id=invoice.tenant_id,
        position=position,
        kind=InvoiceLine.Kind.COMMITMENT,
        description=commitment.name,
        femto=commitment.fee * FEMTO_A_CENT,
        cents=commitment.fee,
    )


def _write(invoice: Invoice, lines: list[InvoiceLine]) -> Invoice:
    _address(invoice)
    with suppress(NoTaxRule):  # a draft may be without; finalising it will say so
        _total(invoice, lines)
    invoice.save()
    InvoiceLine.objects.all_tenants().bulk_create(lines)
    return invoice


def _address(invoice: Invoice) -> None:
    """Note who bills whom, as they are called now."""
    entity = invoice.entity
    invoice.seller = entity.party() | {
        "registration": entity.registration,
        "email": entity.email,
        "payment_details": entity.payment_details,
    }
    profile = BillingProfile.objects.for_tenant(invoice.tenant_id).first()
    if profile is None:
        nowhere = dict.fromkeys(ADDRESS, "")
        invoice.buyer = {**nowhere, "name": invoice.tenant.name, "country": entity.country, "po_number": ""}
    else:
        invoice.buyer = profile.party() | {"po_number": profile.po_number}


def _total(invoice: Invoice, lines: list[InvoiceLine]) -> list[tuple[CreditGrant, int]]:
    """Add the lines up; gives the credit that an invoice burns.

    Raises:
        NoTaxRule: nobody has said which tax holds.
    """
    use = sum(line.cents for line in lines if line.kind == InvoiceLine.Kind.USAGE)
    invoice.subtotal = sum(line.cents for line in lines)
    invoice.residue_femto = sum(line.cents * FEMTO_A_CENT - int(line.femto) for line in lines)
    invoice.saved_femto = sum(int(line.saved_femto) for line in lines)
    burnt: list[tuple[CreditGrant, int]] = []
    if invoice.gives_back:
        invoice.taxable, invoice.taxes = _given_back(invoice)
        rest = invoice.subtotal - invoice.taxable
        invoice.credits = [{"label": "Given back as credit", "cents": rest}] if rest else []
    else:
        burnt = credits.burnt(credits.usable(invoice.tenant_id, invoice.period), use)
        invoice.credits = [{"label": str(grant), "cents": cents} for grant, cents in burnt]
        invoice.taxable = invoice.subtotal - sum(cents for _, cents in burnt)
        last_day = (invoice.period.ends_at - timedelta(microseconds=1)).astimezone(_zone(invoice)).date()
        invoice.taxes = [taxed(tax_for(invoice.entity_id, invoice.buyer, last_day), invoice.taxable)]
    invoice.total = invoice.taxable + sum(tax["tax"] for tax in invoice.taxes)
    return burnt


def _given_back(note: Invoice) -> tuple[int, list[dict[str, Any]]]:
    """Of a credit note: how much was charged as money and so is given back as such, and its taxes.

    The last note on an invoice gives back what is left of its tax, so that together they give back what was taken.
    """
    billed = note.refers_to
    if billed is None:
        return 0, []
    earlier = list(billed.credit_notes.exclude(state=Invoice.State.DRAFT).exclude(pk=note.pk))
    left = billed.taxable - sum(other.taxable for other in earlier)
    base = min(note.subtotal, left)
    taxes = []
    for index, tax in enumerate(billed.taxes):
        share = taxed({name: tax[name] for name in ("category", "rate_ppm", "label", "note")}, base)
        if base == left:
            share["tax"] = tax["tax"] - sum(other.taxes[index]["tax"] for other in earlier if other.taxes)
        taxes.append(share)
    return base, taxes


def _zone(invoice: Invoice) -> ZoneInfo:
    return ZoneInfo(invoice.entity.time_zone)


def do_finalise(invoice: Invoice, now: datetime | None = None) -> Invoice:
    """Give a draft its number, burn credit, book it and store its PDF; from then on it never changes.

    Raises:
        Conflict: the draft is older than the period's end, or nobody has said which tax it carries.
    """
    now = now or datetime.now(UTC)
    with booking(invoice.tenant_id):
        rows = Invoice.objects.for_tenant(invoice.tenant_id).select_related("entity", "period", "tenant", "refers_to")
        row = rows.select_for_update(of=("self",)).filter(pk=invoice.pk).first()
        if row is None:
            raise Conflict("This draft is gone.")
        if row.state != Invoice.State.DRAFT:
            return row
        if not row.complete:
            raise Conflict("Its period was open when this was drafted. Close it and draft it again.")
        _address(row)
        lines = list(row.lines.all())
        try:
            burnt = _total(row, lines)
        except NoTaxRule as fault:
            raise Conflict(str(fault)) from fault
        _issue(row, now)
        _fix(row, lines)
        credits.use(row, burnt)
        _book(row)
        audit.record("invoice.finalise", row, tenant_id=row.tenant_id, after=audit.described(row))
        InvoiceMail.objects.create(invoice=row, tenant_id=row.tenant_id, kind=InvoiceMail.Kind.ISSUED)
    return row


def _issue(invoice: Invoice, now: datetime) -> None:
    """Date it, pin the rate its sum is shown at, and take the next number: the series is locked from here on."""
    entity, today = invoice.entity, now.astimezone(_zone(invoice)).date()
    invoice.issued_at = now
    if not invoice.gives_back:
        invoice.due_on = today + timedelta(days=entity.terms_days)
    profile = BillingProfile.objects.for_tenant(invoice.tenant_id).first()
    if profile is not None and profile.currency != "USD":
        rates = ExchangeRate.objects.filter(currency=profile.currency, on__lte=today).order_by("-on")
        if (rate := rates.first()) is not None:
            invoice.display_currency, invoice.display_rate = rate.currency, rate.micro_per_usd
    prefix = entity.credit_note_prefix if invoice.gives_back else entity.invoice_prefix
    with connection.cursor() as cursor:
        cursor.execute(_NEXT_NUMBER, [entity.pk, prefix, today.year])
        invoice.number = f"{prefix}-{today.year}-{cursor.fetchone()[0]:06}"


def _fix(invoice: Invoice, lines: list[InvoiceLine]) -> None:
    """Save it for good, with its PDF."""
    described = document.described(invoice, lines)
    invoice.sha256 = hashlib.sha256(document.encoded(described)).hexdigest()
    invoice.state = Invoice.State.OPEN
    invoice.save()
    made = pdf.rendered(described)
    InvoiceFile.objects.create(
        invoice=invoice, tenant_id=invoice.tenant_id, pdf=made, sha256=hashlib.sha256(made).hexdigest()
    )


def _book(invoice: Invoice) -> None:
    """Into the ledger, and match it with what was paid before."""
    nano = {name: getattr(invoice, name) * NANO_A_CENT for name in ("subtotal", "taxable", "total")}
    tax, key = nano["total"] - nano["taxable"], f"invoice:{invoice.pk}"
    if invoice.gives_back:
        _book_note(invoice, nano, tax)
        return
    entries = [
        Entry(Account.RECEIVABLE, nano["total"], invoice.pk),
        Entry(Account.CREDITS, nano["subtotal"] - nano["taxable"], invoice.pk),
        Entry(Account.REVENUE, -nano["subtotal"], invoice.pk),
        Entry(Account.TAX, -tax, invoice.pk),
    ]
    post(invoice.tenant_id, key, entries)
    match_deposits(invoice.tenant_id)
    note_balance(invoice)


def _book_note(note: Invoice, nano: dict[str, int], tax: int) -> None:
    """What a note gives back pays its invoice; what that has been paid already becomes a deposit; and what was paid by
    credit is credit again."""
    owed = 0 if note.refers_to is None else outstanding(note.refers_to) * NANO_A_CENT
    part = min(owed, nano["total"])
    entries = [
        Entry(Account.REVENUE, nano["taxable"], note.pk),
        Entry(Account.TAX, tax, note.pk),
        Entry(Account.RECEIVABLE, -part, note.refers_to_id),
        Entry(Account.DEPOSITS, part - nano["total"]),
    ]
    post(note.tenant_id, f"invoice:{note.pk}", entries)
    note.state = Invoice.State.PAID
    note.save(update_fields=["state"])
    if rest := nano["subtotal"] - nano["taxable"]:
        credits.do_grant_credit(note.tenant_id, CreditGrant.Kind.PROMOTIONAL, rest, note=f"Credit note {note.number}")
    if note.refers_to is not None:
        note_balance(note.refers_to)
    match_deposits(note.tenant_id)


def do_issue_credit_note(invoice: Invoice, amounts: Iterable[tuple[str, int]], reason: str) -> Invoice:
    """Give back part of an invoice: (what for, cents before tax) each, at the invoice's own tax.

    Raises:
        ActionRefused: nothing, or less. Conflict: the invoice is no longer owed or paid, or was less than that.
    """
    amounts = list(amounts)
    if not amounts or any(cents <= 0 for _, cents in amounts):
        raise ActionRefused("Each amount must be more than nothing.")
    with booking(invoice.tenant_id) as tenant:
        rows = Invoice.objects.for_tenant(tenant).select_related("entity", "period")
        billed = rows.select_for_update(of=("self",)).get(pk=invoice.pk)
        if billed.gives_back or billed.state not in (Invoice.State.OPEN, Invoice.State.PAID):
            raise Conflict("Only an invoice that is open or paid can be credited.")
        same = Invoice.objects.for_tenant(tenant).filter(period=billed.period, kind=Invoice.Kind.CREDIT_NOTE)
        note = Invoice(
            tenant=tenant,
            entity=billed.entity,
            period=billed.period,
            kind=Invoice.Kind.CREDIT_NOTE,
            revision=same.count() + 1,
            refers_to=billed,
            reason=reason,
            complete=True,
        )
        lines = [_credit(note, number, *amount) for number, amount in enumerate(amounts, 1)]
        _write(note, lines)
        if note.taxable < note.subtotal:
            raise Conflict(f"Only {dollars(note.taxable)} of this invoice are left to give back.")
        return do_finalise(note)


def _credit(note: Invoice, position: int, description: str, cents: int) -> InvoiceLine:
    return InvoiceLine(
        invoice=note,
        tenant_id=note.tenant_id,
        position=position,
        kind=InvoiceLine.Kind.CREDIT,
        description=description,
        femto=cents * FEMTO_A_CENT,
        cents=cents,
    )


def do_void(invoice: Invoice, reason: str) -> Invoice:
    """Take back an invoice of which nothing was paid or credited; it keeps its number, and may be drafted anew.

    Raises:
        Conflict: it is not open, or something was.
    """
    with booking(invoice.tenant_id):
        row = Invoice.objects.for_tenant(invoice.tenant_id).select_for_update().get(pk=invoice.pk)
        if row.state != Invoice.State.OPEN or outstanding(row) != row.total or row.credit_notes.exists():
            raise Conflict("Only an open invoice of which nothing was paid or credited can be void: use a credit note.")
        credits.do_give_back(row)
        booked = LedgerEntry.objects.for_tenant(row.tenant_id).filter(transaction__key=f"invoice:{row.pk}")
        undone = [Entry(Account(entry.account), -entry.nano, row.pk) for entry in booked.order_by("pk")]
        post(row.tenant_id, f"void:{row.pk}", undone)
        _end(row, Invoice.State.VOID, reason)
    return row


def do_write_off(invoice: Invoice, reason: str) -> Invoice:
    """Give up on what is still owed.

    Raises:
        Conflict: it is not open.
    """
    with booking(invoice.tenant_id):
        row = Invoice.objects.for_tenant(invoice.tenant_id).select_for_update().get(pk=invoice.pk)
        if row.gives_back or row.state != Invoice.State.OPEN:
            raise Conflict("Only an open invoice can be uncollectible.")
        nano = outstanding(row) * NANO_A_CENT
        entries = [Entry(Account.BAD_DEBT, nano, row.pk), Entry(Account.RECEIVABLE, -nano, row.pk)]
        post(row.tenant_id, f"bad-debt:{row.pk}", entries)
        _end(row, Invoice.State.UNCOLLECTIBLE, reason)
    return row


def _end(invoice: Invoice, state: Invoice.State, reason: str) -> None:
    before = audit.described(invoice)
    invoice.state = state
    invoice.save(update_fields=["state"])
    after = audit.described(invoice) | {"reason": reason}
    audit.record(f"invoice.{state.value}", invoice, tenant_id=invoice.tenant_id, before=before, after=after)
