"""The list of invoices and credit notes, and of the balance due."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.db.models import Q

from billing.actions.credits import with_rest
from billing.budgets.forecast import forecast_tenant
from billing.invoicing.preview import period_at
from billing.ledger import balance
from billing.metering.usage import UsageReport, sums, total
from billing.models import CHARGES, Account, CreditGrant, Invoice, LedgerEntry
from frontend.core.languages import day_text
from frontend.core.lists import ListPage, keyset_page
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.invoices.states import owed_on, state_of, today_of
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

PAGE_SIZE = 25


def upcoming(ctx: PageContext) -> dict[str, Any] | None:
    """Return the upcoming invoice; None if nothing was ever billed. `issued_on` is its expected issue date."""
    with all_tenants_scope(BypassReason.BILLING):  # billing entities are outside the tenant's scope
        period = period_at(ctx.tenant, ctx.now)
    if period is None:
        return None
    zone = ZoneInfo(period.entity.time_zone)
    used = total(sums(UsageReport(ctx.tenant.pk, start=period.starts_at, end=period.ends_at)))
    forecast = forecast_tenant(ctx.tenant.pk, ctx.now)
    end = period.ends_at.astimezone(zone)
    first, last = period.starts_at.astimezone(zone).date(), (end - timedelta(microseconds=1)).date()
    return {
        "month": day_text(first, "F Y"),
        "first": first,
        "last": last,
        "zone": period.entity.time_zone,
        "usage": Money(used["cost_femto"]),
        "forecast": forecast,
        "issued_on": end.date(),
    }


def balance_due(ctx: PageContext) -> dict[str, Any]:
    """Return the balance due, and the credit and deposits that can pay it."""
    tenant = ctx.tenant
    rows = Invoice.objects.for_tenant(tenant).filter(invoice_type__in=CHARGES, state=Invoice.State.OPEN)
    opened = list(rows.only("pk", "due_on", "currency"))
    owed = owed_on(LedgerEntry.objects.for_tenant(tenant), opened)
    alive = CreditGrant.objects.for_tenant(tenant).filter(
        Q(expires_at=None) | Q(expires_at__gt=ctx.now), starts_at__lte=ctx.now
    )
    grants = [row for row in with_rest(alive) if row.rest > 0]
    return {
        "owed": Money(sum(amount.femto for amount in owed.values())),
        "open": len(opened),
        "past_due": sum(row.due_on is not None and row.due_on < ctx.now.astimezone(UTC).date() for row in opened),
        "credit": Money.nano(sum(row.rest for row in grants)),
        "expires_at": min((row.expires_at for row in grants if row.expires_at), default=None),
        "deposits": Money.nano(-balance(tenant.pk, Account.DEPOSITS)),
    }


def invoice_list(ctx: PageContext) -> ListPage:
    """Return a page of invoices, newest first, without drafts of the current month, which `upcoming` shows."""
    with all_tenants_scope(BypassReason.BILLING):  # periods and entities belong to no tenant
        rows = Invoice.objects.for_tenant(ctx.tenant).select_related("period", "entity", "refers_to")
        rows = rows.exclude(state=Invoice.State.DRAFT, complete=False)
        page = keyset_page(ctx, rows, ctx.url("invoices"), PAGE_SIZE)
        owed = owed_on(LedgerEntry.objects.for_tenant(ctx.tenant), page.rows)
    return replace(page, rows=[_row(ctx, row, owed[row.pk]) for row in page.rows])


def _row(ctx: PageContext, invoice: Invoice, owed: Money) -> dict[str, Any]:
    """Return an invoice with its state and its balance due, which drafts and credit notes do not have."""
    final = invoice.state != Invoice.State.DRAFT
    return {
        "invoice": invoice,
        "month": day_text(invoice.period.starts_at.astimezone(ZoneInfo(invoice.entity.time_zone)), "F Y"),
        "state": state_of(invoice, today_of(invoice, ctx.now), owed),
        "owed": None if invoice.is_credit_note or not final else owed,
        "final": final,
    }
