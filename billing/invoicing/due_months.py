"""What a prepaid tenant owes for the months that no final invoice contains: the lines of `month_charges`.

A minimum is owed from the end of its month on. The month of a time also has the one-off lines of earlier months. The
rounding of earlier invoices, less than a cent each, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from billing.invoicing.drafts import find_corrected
from billing.invoicing.line_sources import BilledMonth, MonthDraft
from billing.invoicing.lines import UsageLine
from billing.invoicing.metered_lines import metered_in, reversed_metered
from billing.invoicing.month_charges import month_charges
from billing.invoicing.month_usage import read_usage, store_usage
from billing.models import BillingProfile, Invoice, InvoiceLine, MeteredUsage, Period
from billing.periods import ensure_periods
from billing.pricing.currencies import currency_of
from tenants.actions import Conflict
from tenants.models import Tenant

_KINDS = InvoiceLine.LineType
_OF_USAGE = (_KINDS.USAGE, _KINDS.METERED, _KINDS.TERM)


class DueMonth(NamedTuple):
    """A month without a final invoice. Amounts are in femto-units before tax."""

    period: Period
    lines: list[InvoiceLine]
    usage: int  # the charges that all credit can pay: usage, metered usage and price terms
    other: int  # one-off lines and fees
    corrected: int  # what the corrections of earlier invoices return


def find_due_months(tenant: Tenant, profile: BillingProfile, now: datetime) -> list[DueMonth]:
    """Return a tenant's months without a final invoice, from their first one to that of `now`.

    A closed month without usage is due if it has a draft, which the run that closes it creates. A month after `now` has
    only usage, of admissions by a clock that is ahead.
    """
    entity, periods = profile.entity, _find_periods(tenant, profile, now)
    drafts = Invoice.objects.for_tenant(tenant).filter(
        invoice_type=Invoice.InvoiceType.INVOICE, state=Invoice.State.DRAFT
    )
    drafted = set(drafts.values_list("period_id", flat=True))
    usage = read_usage(periods, tenant.pk)
    metered = MeteredUsage.objects.for_tenant(tenant).filter(invoice_period__in=list(usage)).order_by()
    used = {pk for pk, found in usage.items() if found} | set(metered.values_list("invoice_period", flat=True))
    currency = currency_of(tenant.pk)
    due = []
    for period in periods:
        has_charges = period.starts_at <= now and (period.closed_at is None or period.pk in drafted)
        if has_charges or period.pk in used:
            invoice = Invoice(tenant=tenant, entity=entity, period=period, currency=currency)
            due.append(_charge(invoice, usage[period.pk], now))
    return due


def store_due_usage(tenant: Tenant, profile: BillingProfile, now: datetime) -> None:
    """Store the sums of usage that `find_due_months` reads, so that it reads few events."""
    store_usage(_find_periods(tenant, profile, now), tenant.pk)


def _find_periods(tenant: Tenant, profile: BillingProfile, now: datetime) -> list[Period]:
    """Return the billing periods without a final invoice of the tenant, with that of `now`."""
    entity = profile.entity
    if not Period.objects.filter(entity=entity, starts_at__lte=now, ends_at__gt=now).exists():
        ensure_periods(entity, now, now)
    invoices = Invoice.objects.for_tenant(tenant).filter(invoice_type=Invoice.InvoiceType.INVOICE)
    final = invoices.exclude(state__in=[Invoice.State.DRAFT, Invoice.State.VOID])
    rows = Period.objects.select_related("entity").filter(entity=entity).exclude(pk__in=final.values("period_id"))
    return list(rows.order_by("starts_at"))


def _charge(invoice: Invoice, usage: Sequence[UsageLine], now: datetime) -> DueMonth:
    """Return what a month costs by an unsaved invoice."""
    period = invoice.period
    lines = month_charges(MonthDraft(invoice, usage, has_minimum=period.ends_at <= now))
    left_out = [_KINDS.ROUNDING, *([] if period.starts_at <= now < period.ends_at else [_KINDS.ONE_OFF])]
    other = [line for line in lines if line.line_type not in (*_OF_USAGE, *left_out)]
    return DueMonth(
        period,
        lines,
        _sum(line for line in lines if line.line_type in _OF_USAGE),
        _sum(other) if period.starts_at <= now else 0,
        _sum_corrections(invoice, usage),
    )


def _sum_corrections(invoice: Invoice, usage: Sequence[UsageLine]) -> int:
    """Return what the month's corrections of earlier invoices will return."""
    tenant, period = invoice.tenant, invoice.period
    reversed_periods: list[int] = []
    if metered_in(period, tenant.pk).filter(reverses__isnull=False).exists():
        rows = reversed_metered(period, tenant.pk).values_list("reverses__invoice_period", flat=True)
        reversed_periods = list(rows)
    month = BilledMonth(period, {tenant.pk: list(usage)}, {}, {tenant.pk: reversed_periods}, {})
    returned = 0
    for billed in find_corrected(month, tenant):
        values = {"period": period, "invoice_type": Invoice.InvoiceType.CORRECTION, "refers_to": billed}
        if Invoice.objects.for_tenant(tenant).filter(number__isnull=False, **values).exists():
            continue
        note = Invoice(tenant=tenant, entity=invoice.entity, currency=invoice.currency, **values)
        with suppress(Conflict):  # the usage of the invoice's month is archived
            returned += _sum(month_charges(MonthDraft(note, usage)))
    return returned


def _sum(lines: Iterable[InvoiceLine]) -> int:
    return sum(int(line.femto) for line in lines)
