"""Invoice lines of metered usage."""

from __future__ import annotations

from collections import defaultdict

from django.db.models import Q, QuerySet

from billing.currencies.amounts import NANO_DIGITS, cents, decimal, symbol
from billing.models import Invoice, InvoiceLine, MeteredUsage, Period
from billing.rates.metered import metered_amount, metered_units
from billing.rates.pricing import Component


def metered_in(period: Period, tenant_id: int | None = None) -> QuerySet[MeteredUsage]:
    """Return the metered usage that invoices of the period include, of one tenant or all."""
    rows = MeteredUsage.objects.all_tenants() if tenant_id is None else MeteredUsage.objects.for_tenant(tenant_id)
    return rows.filter(invoice_period=period.pk)


def reversed_metered(period: Period, tenant_id: int | None = None) -> QuerySet[MeteredUsage]:
    """Return the reversals of the period, of one tenant or all, whose metered usage an earlier period billed."""
    return metered_in(period, tenant_id).exclude(reverses=None).exclude(reverses__invoice_period=period.pk)


def metered_lines(document: Invoice) -> list[InvoiceLine]:
    """Return a line for each price of an invoice's metered usage, or of what a correction reverses."""
    rows_of = metered_in(document.period, document.tenant_id)
    if document.invoice_type == Invoice.InvoiceType.INVOICE:
        rows_of = rows_of.filter(Q(reverses=None) | Q(reverses__invoice_period=document.period_id))
    elif document.invoice_type == Invoice.InvoiceType.CORRECTION and document.refers_to is not None:
        rows_of = rows_of.filter(reverses__invoice_period=document.refers_to.period_id)
    else:
        return []
    sign = -1 if document.is_credit_note else 1
    groups: dict[tuple[str, str, int, int], list[MeteredUsage]] = defaultdict(list)
    for row in rows_of.order_by("model", "component", "price_id", "pk"):
        groups[row.model, row.component, row.price_id, row.nano_per_million].append(row)
    lines = []
    for (model, name, _, nano), rows in groups.items():
        component = Component(name)
        units = sum(metered_units(component, row.amount, row.started_at, row.ended_at) for row in rows)
        if not units:  # all of it is reversed
            continue
        price = f"{symbol(document.currency)}{decimal(nano, NANO_DIGITS, 2)} per million"
        femto = sign * sum(int(row.cost_femto) for row in rows)
        lines.append(
            InvoiceLine(
                invoice=document,
                tenant_id=document.tenant_id,
                line_type=InvoiceLine.LineType.METERED,
                description=f"{metered_amount(component, sign * units)} at {price}",
                model=model,
                component=name,
                first_at=rows[0].started_at,
                last_at=max(row.ended_at for row in rows),
                femto=femto,
                cents=cents(femto, document.currency),
            )
        )
    return lines
