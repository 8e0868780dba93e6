"""Invoice lines of metered usage."""

from __future__ import annotations

from collections import defaultdict

from django.db.models import QuerySet

from billing.currencies.amounts import NANO_DIGITS, cents, decimal, half_up, symbol
from billing.models import Invoice, InvoiceLine, MeteredUsage, Period
from billing.rates.metered import metered_units, units_an_hour
from billing.rates.pricing import Component

_DIGITS = 3  # decimals of hours in descriptions


def metered_in(period: Period, tenant_id: int | None = None) -> QuerySet[MeteredUsage]:
    """Return the metered usage that invoices of the period include, of one tenant or all."""
    rows = MeteredUsage.objects.all_tenants() if tenant_id is None else MeteredUsage.objects.for_tenant(tenant_id)
    return rows.filter(invoice_period=period.pk)


def metered_lines(invoice: Invoice) -> list[InvoiceLine]:
    """Return a line for each price of an invoice's metered usage."""
    groups: dict[tuple[str, str, int, int], list[MeteredUsage]] = defaultdict(list)
    for row in metered_in(invoice.period, invoice.tenant_id).order_by("model", "component", "price_id", "pk"):
        groups[row.model, row.component, row.price_id, row.nano_per_million].append(row)
    lines = []
    for (model, name, _, nano), rows in groups.items():
        component = Component(name)
        units = sum(metered_units(component, row.amount, row.started_at, row.ended_at) for row in rows)
        thousandths = half_up(units * 10**_DIGITS, units_an_hour(component))
        label, unit = component.invoice_label, component.unit
        amount, price = decimal(thousandths, _DIGITS), decimal(nano, NANO_DIGITS, 2)
        femto = sum(int(row.cost_femto) for row in rows)
        lines.append(
            InvoiceLine(
                invoice=invoice,
                tenant_id=invoice.tenant_id,
                line_type=InvoiceLine.LineType.METERED,
                description=f"{label}: {amount} {unit} at {symbol(invoice.currency)}{price} per million",
                model=model,
                component=name,
                first_at=rows[0].started_at,
                last_at=max(row.ended_at for row in rows),
                femto=femto,
                cents=cents(femto, invoice.currency),
            )
        )
    return lines
