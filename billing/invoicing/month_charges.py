"""The lines that a month charges a tenant. Drafts, previews, final invoices, notes and checks use this function."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Q

from billing.invoicing.line_sources import (
    BilledMonth,
    CommitmentCharges,
    LineSource,
    MeteredCharges,
    MonthDraft,
    OneOffCharges,
    RecurringCharges,
    RoundingCharges,
    TermCharges,
    UsageCharges,
)
from billing.invoicing.lines import lines_of
from billing.models import Invoice, InvoiceLine
from tenants.models import Tenant

MONTHLY = (Invoice.InvoiceType.INVOICE, Invoice.InvoiceType.CORRECTION)  # drafted by the run of a month
SOURCES: list[LineSource] = [
    UsageCharges(),
    MeteredCharges(),
    TermCharges(),
    CommitmentCharges(),
    OneOffCharges(),
    RecurringCharges(),
    RoundingCharges(),
]


def find_billed(month: BilledMonth, tenant: Tenant | None = None) -> list[Tenant]:
    """Return the tenants to whom a source has something to bill in the month, or only `tenant` if it is one of them.

    Tenants with a draft are included: there may be nothing to bill to them any more.
    """
    drafts = Invoice.objects.all_tenants().filter(period=month.period, state=Invoice.State.DRAFT)
    billed = Q(pk__in=drafts.values("tenant_id"))
    for source in SOURCES:
        billed |= Q(pk__in=source.tenants(month))
    rows = Tenant.objects.all_tenants().filter(billed)
    return list((rows if tenant is None else rows.filter(pk=tenant.pk)).order_by("pk"))


def month_charges(
    draft: MonthDraft, stored: Iterable[InvoiceLine] | None = None, *, at_issue: bool = False
) -> list[InvoiceLine]:
    """Return the lines of a month's invoice, or of a note on one: what it changes.

    Args:
        stored: the lines of the document. The result has only some of the lines computed, and others from here.
        at_issue: with `stored`, compute the lines that are decided at issue. By default, compute all other lines.
    """
    known = None if stored is None else list(stored)
    for source in SOURCES:
        if known is None or source.is_decided_at_issue(draft) is at_issue:
            draft.lines += source.lines(draft)
        else:
            draft.lines += [row for row in known if row.line_type in source.line_types]
    return draft.lines


def changes_balance(document: Invoice, lines: Iterable[InvoiceLine]) -> bool:
    """Return whether a document changes what its tenant owes. Others are not drafted.

    An invoice of less than a cent does: its rounding is carried to the next one. The rounding of a correction is
    carried without a document.
    """
    lines = list(lines)
    is_carried = document.invoice_type == Invoice.InvoiceType.INVOICE and sum(int(line.femto) for line in lines) != 0
    return is_carried or sum(line.cents for line in lines) != 0


def renew_charges(invoice: Invoice) -> MonthDraft:
    """Compute and store the lines of a draft that are decided at issue. Return it with its lines.

    Notes of operators and purchases are returned as they are.
    """
    stored = list(lines_of(invoice))
    if invoice.invoice_type not in MONTHLY:
        return MonthDraft(invoice, lines=stored)
    draft = MonthDraft(invoice)
    month_charges(draft, stored, at_issue=True)
    same = 0  # the first lines, which are stored at their position
    while same < len(draft.lines) and draft.lines[same].pk is not None and draft.lines[same].position == same + 1:
        same += 1
    if same < len(stored):
        lines_of(invoice).filter(position__gt=same).delete()
    store_lines(draft.lines[same:], same)
    return draft


def store_lines(lines: list[InvoiceLine], before: int = 0) -> None:
    """Store the lines of a draft, after `before` others."""
    for row in number_lines(lines, before):
        row.pk = None
    InvoiceLine.objects.all_tenants().bulk_create(lines)


def number_lines(lines: list[InvoiceLine], before: int = 0) -> list[InvoiceLine]:
    """Set the positions of lines that follow `before` others. Return the lines."""
    for position, row in enumerate(lines, before + 1):
        row.position = position
    return lines


def mark_billed(draft: MonthDraft) -> None:
    """Mark what a final document has billed, so that no other one bills it."""
    for source in SOURCES:
        source.mark_billed(draft)
