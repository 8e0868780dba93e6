"""View models of the list of invoices and credit notes, and of the balance due."""

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

PAGE_SIZE = 25


@dataclass(frozen=True)
class UpcomingInvoice:
    """The upcoming invoice. `issued_on` is its expected issue date."""

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
    """The balance due, and the credit and deposits that can pay it."""

    owed: Money
    open: int
    past_due: int
    credit: Money
    expires_at: datetime | None  # the next expiry of a credit
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
    owed: Money | None  # None for drafts and credit notes
    pdf_url: str
    about: str  # the invoice number of a credit note


@dataclass(frozen=True)
class InvoiceListPanel:
    rows: tuple[InvoiceListingRow, ...]
    older_url: str
    newest_url: str


def upcoming(ctx: PageContext) -> UpcomingInvoice | None:
    """Return the upcoming invoice; None if nothing was ever billed."""
    with all_tenants_scope(BypassReason.BILLING):  # billing entities are outside the tenant's scope
        period = period_at(ctx.tenant, ctx.now)
    if period is None:
        return None
    zone = ZoneInfo(period.entity.time_zone)
    used = total(sums(UsageReport(ctx.tenant.pk, start=period.starts_at, end=period.ends_at)))
    forecast = forecast_tenant(ctx.tenant.pk, ctx.now)
    end = period.ends_at.astimezone(zone)
    first, last = period.starts_at.astimezone(zone).date(), (end - timedelta(microseconds=1)).date()
    return UpcomingInvoice(
        f"{first:%B %Y}",
        first,
        last,
        period.entity.time_zone,
        Money(used["cost_femto"]),
        Money.nano(forecast.point) if forecast else None,
        Money.nano(forecast.low) if forecast else None,
        Money.nano(forecast.high) if forecast else None,
        end.date(),
        ctx.url("invoices-upcoming"),
    )


def balance_due(ctx: PageContext) -> InvoiceStatus:
    tenant = ctx.tenant
    rows = Invoice.objects.for_tenant(tenant).filter(invoice_type=Invoice.InvoiceType.INVOICE, state=Invoice.State.OPEN)
    opened = list(rows.only("pk", "due_on"))
    owed = owed_on(LedgerEntry.objects.for_tenant(tenant), opened)
    alive = CreditGrant.objects.for_tenant(tenant).filter(
        Q(expires_at=None) | Q(expires_at__gt=ctx.now), starts_at__lte=ctx.now
    )
    grants = [row for row in with_rest(alive) if row.rest > 0]
    return InvoiceStatus(
        Money(sum(amount.femto for amount in owed.values())),
        len(opened),
        sum(row.due_on is not None and row.due_on < ctx.now.astimezone(UTC).date() for row in opened),
        Money.nano(sum(row.rest for row in grants)),
        min((row.expires_at for row in grants if row.expires_at), default=None),
        Money.nano(-balance(tenant.pk, Account.DEPOSITS)),
    )


def invoice_list(ctx: PageContext) -> InvoiceListPanel:
    """Return a page of invoices, newest first, without drafts of the current month, which `upcoming` shows."""
    with all_tenants_scope(BypassReason.BILLING):  # periods and entities belong to no tenant
        rows = Invoice.objects.for_tenant(ctx.tenant).select_related("period", "entity", "refers_to")
        rows = rows.exclude(state=Invoice.State.DRAFT, complete=False).order_by("-pk")
        before = ctx.query.get("before", "")
        if before.isascii() and before.isdigit() and len(before) < 19:
            rows = rows.filter(pk__lt=int(before))
        found = list(rows[: PAGE_SIZE + 1])
        owed = owed_on(LedgerEntry.objects.for_tenant(ctx.tenant), found)
    older = f"{ctx.url('invoices')}?before={found[PAGE_SIZE - 1].pk}" if len(found) > PAGE_SIZE else ""
    newest = ctx.url("invoices") if ctx.query.get("before") else ""
    return InvoiceListPanel(tuple(_row(ctx, row, owed[row.pk]) for row in found[:PAGE_SIZE]), older, newest)


def _row(ctx: PageContext, invoice: Invoice, owed: Money) -> InvoiceListingRow:
    final = invoice.state != Invoice.State.DRAFT
    return InvoiceListingRow(
        invoice.number or "Draft",
        "Credit note" if invoice.is_credit_note else "Invoice",
        ctx.url("invoices-detail", invoice.pk),
        month_of(invoice.period, invoice.entity.time_zone),
        state_of(invoice, today_of(invoice, ctx.now), owed),
        invoice.issued_at,
        invoice.due_on,
        Money.cents(-invoice.total if invoice.is_credit_note else invoice.total),
        None if invoice.is_credit_note or not final else owed,
        ctx.url("invoices-file", invoice.pk, "pdf") if final else "",
        str(invoice.refers_to.number) if invoice.refers_to else "",
    )


def month_of(period: Period, zone: str) -> str:
    return f"{period.starts_at.astimezone(ZoneInfo(zone)):%B %Y}"
