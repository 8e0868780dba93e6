"""Sources of the lines that a month charges, in the order in which a document has them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import Q, QuerySet
from django.db.models.expressions import RawSQL

from billing.currencies.amounts import DEFAULT_CURRENCY, femto_a_cent
from billing.currencies.iso_codes import CURRENCIES
from billing.invoicing.corrected_prices import RatedDifference
from billing.invoicing.lines import (
    Count,
    UsageLine,
    attach_shares,
    count_usage,
    difference_line,
    find_usage,
    rerated_differences,
    usage_lines,
)
from billing.invoicing.metered_lines import metered_in, metered_lines, reversed_metered
from billing.invoicing.term_lines import active_minimums, term_change, term_lines
from billing.invoicing.usage_shares import UsageLabels, find_labels, find_shares, find_used_labels
from billing.ledger.commitments import active_commitments, commitments_of
from billing.models import CHARGES, Invoice, InvoiceLine, OneOffLine, Period
from tenants.deletions import deleted_throughout, was_deleted_throughout
from tenants.models import Tenant

# What rounding billed too much so far, by tenant and currency, on documents that are not void.
_CARRIED = """
SELECT tenant_id, currency, sum(femto) AS femto FROM (
    SELECT tenant_id, currency,
        rounding_femto * CASE WHEN invoice_type = ANY(%s) THEN 1 ELSE -1 END AS femto
    FROM billing_invoice
    WHERE {tenants} AND number IS NOT NULL AND state <> 'void' AND invoice_type <> 'cancellation'
    UNION ALL
    SELECT r.tenant_id, i.currency, r.rounding_femto
    FROM billing_reratedinvoice r JOIN billing_invoice i ON i.id = r.invoice_id
    WHERE r.{tenants} AND i.state <> 'void'
) carried GROUP BY tenant_id, currency
"""
_CARRIED_OF = _CARRIED.format(tenants="tenant_id = %s")
_LEAVING = _CARRIED.format(
    tenants="tenant_id IN (SELECT id FROM tenants_tenant WHERE purge_after IS NOT NULL OR status = 'purged')"
)
# The deleted tenants to whom at least a cent of rounding was not billed. The parameter has the femto-units of a cent.
_OWED_ROUNDING = f"SELECT tenant_id FROM ({_LEAVING}) owed WHERE femto <= -(%s::jsonb ->> currency)::numeric"  # noqa: S608


class BilledMonth(NamedTuple):
    """A billing period with its usage, by tenant, of one tenant or all.

    `reversed_metered` has the earlier periods that billed metered usage which is reversed in this one.
    `labels` has the tenants whose usage is divided by project and cost center.
    """

    period: Period
    usage: dict[int, list[UsageLine]]
    counts: dict[int, Count]
    reversed_metered: dict[int, list[int]]
    labels: dict[int, UsageLabels]


def read_month(period: Period, tenant_id: int | None = None) -> BilledMonth:
    """Read the usage of a billing period, of one tenant or all."""
    back: dict[int, list[int]] = defaultdict(list)
    rows = reversed_metered(period, tenant_id).values_list("tenant_id", "reverses__invoice_period")
    for tenant, billed_period in rows:
        back[tenant].append(billed_period)
    usage = find_usage(period, tenant_id)
    labels = find_labels(list(usage))
    shares = find_shares(period, labels)
    used = find_used_labels(labels, shares)
    usage |= {tenant: attach_shares(usage[tenant], shares) for tenant in used}
    return BilledMonth(period, usage, count_usage(period, tenant_id), back, used)


@dataclass
class MonthDraft:
    """A document of a month for which lines are computed. `lines` has those of earlier sources.

    `usage` is that of the period in which the document is drafted, and `differences` those of the re-rating that
    issues it. Without `has_minimum`, the month does not owe its minimum yet.
    """

    invoice: Invoice
    usage: Sequence[UsageLine] = ()
    differences: Sequence[RatedDifference] = ()
    has_minimum: bool = True
    lines: list[InvoiceLine] = field(default_factory=list)

    @cached_property
    def changed(self) -> list[RatedDifference]:
        """Return the differences of re-ratings that are on the document."""
        return [*self.differences, *rerated_differences(self.invoice)]

    @cached_property
    def one_off_lines(self) -> list[OneOffLine]:
        """Return the tenant's one-off lines of the month. Those that repeat in it have a last month."""
        period = self.invoice.period
        return list((_due_lines(period) | _recurring_lines(period)).filter(tenant_id=self.invoice.tenant_id))

    @property
    def is_invoice(self) -> bool:
        """Return whether the document is a month's invoice, and no note on one."""
        return self.invoice.invoice_type == Invoice.InvoiceType.INVOICE


class LineSource:
    """A source of lines. Each type of lines belongs to one source."""

    line_types: tuple[str, ...] = ()

    def tenants(self, month: BilledMonth) -> Any:
        """Return the tenants to whom the source has something to bill, as a query or as their IDs."""
        return ()

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        """Return the lines of an invoice, or what a note changes."""
        raise NotImplementedError

    def is_decided_at_issue(self, draft: MonthDraft) -> bool:
        """Return whether lines can change between draft and issue. A check takes such lines from the document."""
        return False

    def mark_billed(self, draft: MonthDraft) -> None:
        """Mark what a final document has billed."""


class UsageCharges(LineSource):
    """Usage at the prices pinned at its admission, its reversals, and what applied re-ratings change."""

    line_types = (InvoiceLine.LineType.USAGE, InvoiceLine.LineType.CREDIT)

    def tenants(self, month: BilledMonth) -> Any:
        return list(month.usage)

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        return usage_lines(draft.invoice, draft.usage, (item for item in draft.changed if not item.is_metered))


class MeteredCharges(LineSource):
    """Metered usage, its reversals, and what applied re-ratings change."""

    line_types = (InvoiceLine.LineType.METERED,)

    def tenants(self, month: BilledMonth) -> Any:
        return metered_in(month.period).values("tenant_id")

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        changed = [difference_line(draft.invoice, item) for item in draft.changed if item.is_metered]
        return [*metered_lines(draft.invoice), *changed]


class TermCharges(LineSource):
    """Price terms: tiers, discounts and minimums."""

    line_types = (InvoiceLine.LineType.TERM,)

    def tenants(self, month: BilledMonth) -> Any:
        return _of_entity(month, active_minimums(month.period))

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        if draft.is_invoice:
            return term_lines(draft.invoice, draft.lines, has_minimum=draft.has_minimum)
        return term_change(draft.invoice, draft.lines)

    def is_decided_at_issue(self, draft: MonthDraft) -> bool:
        return not draft.is_invoice  # other notes may be final now


class CommitmentCharges(LineSource):
    """Monthly fees of commitments."""

    line_types = (InvoiceLine.LineType.COMMITMENT,)

    def tenants(self, month: BilledMonth) -> Any:
        return _of_entity(month, active_commitments(month.period))

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        if not draft.is_invoice:
            return []
        month = draft.invoice.period.label
        active = commitments_of(draft.invoice.period, draft.invoice.tenant_id)
        return [
            _amount_line(draft.invoice, self.line_types[0], row.share_in(month).describe(row.name), row.fee_in(month))
            for row in active
        ]

    def is_decided_at_issue(self, draft: MonthDraft) -> bool:
        return True


class OneOffCharges(LineSource):
    """One-off lines that are due. They do not repeat."""

    line_types = (InvoiceLine.LineType.ONE_OFF,)

    def tenants(self, month: BilledMonth) -> Any:
        return _of_entity(month, _due_lines(month.period))

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        if not draft.is_invoice:
            return []
        due = [row for row in draft.one_off_lines if not row.last_month]
        return [_amount_line(draft.invoice, self.line_types[0], row.description, row.cents) for row in due]

    def is_decided_at_issue(self, draft: MonthDraft) -> bool:
        return True

    def mark_billed(self, draft: MonthDraft) -> None:
        if draft.is_invoice and any(line.line_type in self.line_types for line in draft.lines):
            due = _due_lines(draft.invoice.period).filter(tenant_id=draft.invoice.tenant_id)
            due.update(invoice=draft.invoice)


class RecurringCharges(LineSource):
    """One-off lines that repeat each month."""

    line_types = (InvoiceLine.LineType.RECURRING,)

    def tenants(self, month: BilledMonth) -> Any:
        starts_at, ends_at = month.period.starts_at, month.period.ends_at
        return _of_entity(month, _recurring_lines(month.period).exclude(deleted_throughout(starts_at, ends_at)))

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        if not draft.is_invoice:
            return []
        period = draft.invoice.period
        rows = [row for row in draft.one_off_lines if row.last_month]
        if rows and was_deleted_throughout(draft.invoice.tenant_id, period.starts_at, period.ends_at):
            return []
        return [_amount_line(draft.invoice, self.line_types[0], row.description, row.cents) for row in rows]

    def is_decided_at_issue(self, draft: MonthDraft) -> bool:
        return True


class RoundingCharges(LineSource):
    """Rounding of earlier invoices in whole cents.

    The rest, and the rounding of the invoice itself, are carried to the next invoice. An invoice of a tenant whose
    deletion is scheduled also bills its own rounding. The invoice's subtotal does not become negative.
    """

    line_types = (InvoiceLine.LineType.ROUNDING,)

    def tenants(self, month: BilledMonth) -> Any:
        units = json.dumps({code: femto_a_cent(code) for code in {*CURRENCIES, DEFAULT_CURRENCY}})
        owed = RawSQL(_OWED_ROUNDING, [list(CHARGES), units])  # noqa: S611  (constants)
        return _of_entity(month, Tenant.objects.all_tenants().filter(pk__in=owed), "")

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        invoice = draft.invoice
        is_leaving = invoice.tenant.purge_after is not None or invoice.tenant.status == Tenant.Status.PURGED
        if not draft.is_invoice or not (draft.lines or is_leaving):
            return []
        unit = femto_a_cent(invoice.currency)
        billed_more = _carried_rounding(invoice.tenant_id)
        if is_leaving:
            billed_more += sum(line.cents * unit - int(line.femto) for line in draft.lines)
        whole = abs(billed_more) // unit
        cents = max(-whole if billed_more > 0 else whole, -sum(line.cents for line in draft.lines))
        if not cents:
            return []
        row = _amount_line(invoice, self.line_types[0], "Rounding of earlier invoices", cents)
        row.femto = 0
        return [row]

    def is_decided_at_issue(self, draft: MonthDraft) -> bool:
        return True


def _of_entity(month: BilledMonth, rows: QuerySet[Any], prefix: str = "tenant__") -> QuerySet[Any]:
    """Return the tenants of the rows that the month's entity bills."""
    entity = month.period.entity
    billed = Q(**{f"{prefix}billingprofile__entity": entity})
    if entity.slug == "default":
        billed |= Q(**{f"{prefix}billingprofile": None})
    return rows.filter(billed).order_by().values(f"{prefix}pk")


def _due_lines(period: Period) -> QuerySet[OneOffLine]:
    """Return the one-off lines that an invoice of the period bills."""
    rows = OneOffLine.objects.all_tenants().filter(invoice=None, last_month="")
    return rows.filter(month__lte=period.label).order_by("pk")


def _recurring_lines(period: Period) -> QuerySet[OneOffLine]:
    """Return the one-off lines that repeat in the period's month, also those of tenants that were deleted in it."""
    return OneOffLine.objects.all_tenants().filter(month__lte=period.label, last_month__gte=period.label).order_by("pk")


def _carried_rounding(tenant_id: int) -> int:
    """Return the femto-units that rounding billed too much so far."""
    with connection.cursor() as cursor:
        cursor.execute(_CARRIED_OF, [list(CHARGES), tenant_id, tenant_id])
        return sum(int(femto) for _, _, femto in cursor.fetchall())


def _amount_line(invoice: Invoice, line_type: str, description: str, cents: int) -> InvoiceLine:
    return InvoiceLine(
        invoice=invoice,
        tenant_id=invoice.tenant_id,
        line_type=line_type,
        description=description,
        femto=cents * femto_a_cent(invoice.currency),
        cents=cents,
    )
