"""Checks of invoices: recomputed from usage events and prices, and compared byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from django.db import connection

from billing.currencies.amounts import cents, femto_a_cent, nano_a_cent
from billing.invoicing import document, pdf
from billing.invoicing.files import stored_pdf
from billing.invoicing.line_sources import MonthDraft
from billing.invoicing.lines import Count, UsageLine, attach_shares, count_usage, find_usage, lines_of
from billing.invoicing.month_charges import month_charges, number_lines
from billing.invoicing.term_lines import month_difference
from billing.invoicing.usage_shares import find_shares
from billing.ledger.ledger import sum_booked
from billing.metering.archives import require_usage
from billing.models import Account, Invoice, InvoiceLine
from billing.taxes.taxes import compute_tax

_UNRATED = """
SELECT count(*) FROM billing_usageevent
WHERE invoice_period = %s AND tenant_id = %s AND price_ids IS NULL AND outcome <> 'failed'
"""


class InvoiceCheckResult(NamedTuple):
    """The result of checking a final invoice."""

    events: int
    unrated: int  # events without a price that did not fail; must be 0
    ledger_difference: int  # cents between the ledger and the lines; must be 0
    same_data: bool  # whether the recomputed JSON is the same
    same_pdf: bool  # whether the recomputed PDF is the same
    sha256: str  # hash of the recomputed JSON
    month_difference: int  # cents that the documents of the month lack; 0, unless an earlier release computed them


def check(invoice: Invoice) -> InvoiceCheckResult:
    """Recompute a final invoice. A scope that sees it must be open; `invoice` needs its period, entity and `refers_to`.

    Raises:
        Conflict: its usage is archived.
    """
    tenant_id = invoice.tenant_id
    counts = count_usage(invoice.period, tenant_id).get(tenant_id, Count())
    made = recompute_document(invoice, _find_usage(invoice), counts)
    require_usage(invoice.period_id)
    data = hashlib.sha256(document.encode_document(made)).hexdigest()
    with connection.cursor() as cursor:
        cursor.execute(_UNRATED, [invoice.period_id, tenant_id])
        unrated = cursor.fetchone()[0]
    sign = 1 if invoice.is_credit_note else -1
    account = Account.CREDITS if invoice.sells_credit else Account.REVENUE
    revenue = sign * sum_booked(tenant_id, f"invoice:{invoice.pk}", account) // nano_a_cent(invoice.currency)
    return InvoiceCheckResult(
        events=counts.events,
        unrated=unrated,
        ledger_difference=revenue - invoice.booked_revenue,
        same_data=data == invoice.sha256,
        same_pdf=pdf.render_pdf(made) == stored_pdf(invoice),
        sha256=data,
        month_difference=_month_difference(invoice),
    )


def _find_usage(invoice: Invoice) -> list[UsageLine]:
    """Return the usage of an invoice's tenant in its period, with the shares that the invoice names."""
    tenant_id, charged = invoice.tenant_id, invoice.cancels or invoice
    uses = find_usage(invoice.period, tenant_id).get(tenant_id, [])
    if not charged.usage_labels:
        return uses
    return attach_shares(uses, find_shares(invoice.period, {tenant_id: charged.usage_labels}))


def _month_difference(document: Invoice) -> int:
    """Return the cents before tax that the documents of a month lack. `document` is its invoice, or a note on it."""
    billed = document if document.refers_to is None else document.refers_to
    if billed.invoice_type != Invoice.InvoiceType.INVOICE or billed.state == Invoice.State.VOID:
        return 0
    return cents(month_difference(billed), billed.currency)


def recompute_document(invoice: Invoice, uses: Iterable[UsageLine], count: Count) -> dict[str, Any]:
    """Return the invoice's document with lines, counts and sums recomputed from usage and prices.

    What was decided at issue (number, dates, parties, fees, credits, tax rule) is taken from the invoice.
    """
    charged = invoice.cancels or invoice  # a cancellation has the lines of the document that it cancels
    stored = list(lines_of(invoice))
    lines = month_charges(MonthDraft(charged, list(uses)), stored)
    fixed = (InvoiceLine.LineType.CREDIT, InvoiceLine.LineType.PREPAID)
    lines += [row for row in stored if row.line_type in fixed and row.price_id is None]
    number_lines(lines)
    made = Invoice(**{field.attname: getattr(invoice, field.attname) for field in Invoice._meta.concrete_fields})
    made.period, made.entity, made.refers_to = invoice.period, invoice.entity, invoice.refers_to
    made.replaces = invoice.replaces
    made.subtotal = sum(item.cents for item in lines)
    unit = femto_a_cent(invoice.currency)
    made.rounding_femto = sum(item.cents * unit - int(item.femto) for item in lines)
    made.taxable = made.subtotal - sum(credit["cents"] for credit in invoice.credits)
    if invoice.invoice_type == Invoice.InvoiceType.INVOICE:  # a note's tax is a share of its invoice's
        made.events, made.saved_femto = count.events, max(0, count.saved)
        rules = ({name: tax[name] for name in tax if name not in ("base", "tax")} for tax in invoice.taxes)
        made.taxes = [compute_tax(rule, made.taxable) for rule in rules]
    made.total = made.taxable + sum(tax["tax"] for tax in made.taxes)
    return document.describe_invoice(made, lines)
