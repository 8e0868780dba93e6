"""The list of invoices and credit notes, and what stands above it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from django.db.models import Q

from billing.actions.credits import with_rest
from billing.budgets.forecast import forecast_tenant
from billing.invoicing.preview import period_at
from billing.ledger import balance
from billing.metering.usage import UsageReport, sums, total
from billing.models import Account, CreditGrant, Invoice, LedgerEntry, Period
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.invoices.states import State, owed_on, state_of, today_of
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

PAGE = 25


@dataclass(frozen=True)
class Upcoming:
    """Upcoming invoice. `issued_on`: when its invoice is to be expected."""

    month: str
    first: date
    last: date
    zone: str
    usage: Money
    forecast: Money | None
    low: Money | None
    high: Money | None
    issued_on: date
    url: str


@dataclass(frozen=True)
class InvoiceStatus:
    """What is owed, and what there is to pay it with."""

    owed: Money
    open: int
    past_due: int
    credit: Money
    expires_at: datetime | None  # the next of the credits to expire
    deposits: Money


@dataclass(frozen=True)
class InvoiceListingRow:
    name: str
    what: str
    url: str
    month: str
    state: State
    issued_at: datetime | None
    due_on: date | None
    total: Money
    owed: Money | None  # None where nothing can be owed
    pdf_url: str
    about: str  # of a credit note: the invoice's number


@dataclass(frozen=True)
class InvoiceListItem:
    rows: tuple[InvoiceListingRow, ...]
    older_url: str
    newest_url: str


def upcoming(visit: PageContext) -> Upcoming | None:
    """Upcoming invoice; None while nobody was billed for anything yet."""
    with all_tenants_scope(BypassReason.BILLING):  # whose month it is, is the entity's to say
        period = period_at(visit.tenant, visit.now)
    if period is None:
        return None
    zone = ZoneInfo(period.entity.time_zone)
    used = total(sums(UsageReport(visit.tenant.pk, start=period.starts_at, end=period.ends_at)))
    coming = forecast_tenant(visit.tenant.pk, visit.now)
    end = period.ends_at.astimezone(zone)
    first, last = period.starts_at.astimezone(zone).date(), (end - timedelta(microseconds=1)).date()
    return Upcoming(
        f"{first:%B %Y}",
        first,
        last,
        period.entity.time_zone,
        Money(used["cost_femto"]),
        Money.nano(coming.point) if coming else None,
        Money.nano(coming.low) if coming else None,
        Money.nano(coming.high) if coming else None,
        end.date(),
        visit.url("invoices-upcoming"),
    )


def standing(visit: PageContext) -> InvoiceStatus:
    tenant = visit.tenant
    rows = Invoice.objects.for_tenant(tenant).filter(invoice_type=Invoice.InvoiceType.INVOICE, state=Invoice.State.OPEN)
    opened = list(rows.only("pk", "due_on"))
    owed = owed_on(LedgerEntry.objects.for_tenant(tenant), opened)
    alive = CreditGrant.objects.for_tenant(tenant).filter(
        Q(expires_at=None) | Q(expires_at__gt=visit.now), starts_at__lte=visit.now
    )
    grants = [row for row in with_rest(alive) if row.rest > 0]
    return InvoiceStatus(
        Money(sum(each.femto for each in owed.values())),
        len(opened),
        sum(row.due_on is not None and row.due_on < visit.now.astimezone(UTC).date() for row in opened),
        Money.nano(sum(row.rest for row in grants)),
        min((row.expires_at for row in grants if row.expires_at), default=None),
        Money.nano(-balance(tenant.pk, Account.DEPOSITS)),
    )


def listed(visit: PageContext) -> InvoiceListItem:
    """Return a page of them, newest first. What is drafted of a month that continues is the upcoming one's to show."""
    with all_tenants_scope(BypassReason.BILLING):  # months and their entities are nobody's rows
        rows = Invoice.objects.for_tenant(visit.tenant).select_related("period", "entity", "refers_to")
        rows = rows.exclude(state=Invoice.State.DRAFT, complete=False).order_by("-pk")
        before = visit.query.get("before", "")
        if before.isascii() and before.isdigit() and len(before) < 19:
            rows = rows.filter(pk__lt=int(before))
        found = list(rows[: PAGE + 1])
        owed = owed_on(LedgerEntry.objects.for_tenant(visit.tenant), found)
    older = f"{visit.url('invoices')}?before={found[PAGE - 1].pk}" if len(found) > PAGE else ""
    newest = visit.url("invoices") if visit.query.get("before") else ""
    return InvoiceListItem(tuple(_row(visit, row, owed[row.pk]) for row in found[:PAGE]), older, newest)


def _row(visit: PageContext, invoice: Invoice, owed: Money) -> InvoiceListingRow:
    final = invoice.state != Invoice.State.DRAFT
    return InvoiceListingRow(
        invoice.number or "Draft",
        "Credit note" if invoice.is_credit_note else "Invoice",
        visit.url("invoices-detail", invoice.pk),
        month_of(invoice.period, invoice.entity.time_zone),
        state_of(invoice, today_of(invoice, visit.now), owed),
        invoice.issued_at,
        invoice.due_on,
        Money.cents(-invoice.total if invoice.is_credit_note else invoice.total),
        None if invoice.is_credit_note or not final else owed,
        visit.url("invoices-file", invoice.pk, "pdf") if final else "",
        str(invoice.refers_to.number) if invoice.refers_to else "",
    )


def month_of(period: Period, zone: str) -> str:
    return f"{period.starts_at.astimezone(ZoneInfo(zone)):%B %Y}"
