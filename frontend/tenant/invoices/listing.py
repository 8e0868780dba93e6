"""The list of invoices and credit notes, and of the balance due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from billing.budgets.forecast import forecast_tenant
from billing.invoicing.preview import period_at
from billing.ledger.credits import with_rest
from billing.ledger.ledger import balance
from billing.metering.usage import UsageReport, sums, total
from billing.models import CHARGES, Account, CreditGrant, Invoice, LedgerEntry
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar
from frontend.core.labels import choice_label
from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import ListPage, keyset_page
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult
from frontend.tenant.invoices.states import balance_due_of, open_balances, owed_on, signed_amounts, state_of, today_of
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
    forecast = forecast_tenant(ctx.tenant.pk, ctx.now, zone)
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
    charges = Invoice.objects.for_tenant(tenant).filter(invoice_type__in=CHARGES)
    with all_tenants_scope(BypassReason.BILLING):  # billing entities belong to no tenant
        opened = open_balances(LedgerEntry.objects.for_tenant(tenant), charges, ctx.now)
    alive = CreditGrant.objects.for_tenant(tenant).filter(
        Q(expires_at=None) | Q(expires_at__gt=ctx.now), starts_at__lte=ctx.now
    )
    grants = [row for row in with_rest(alive) if row.rest > 0]
    return {
        "owed": Money(sum(amount.femto for amount in opened.owed.values())),
        "open": len(opened.invoices),
        "past_due": opened.past_due,
        "credit": Money.nano(sum(row.rest for row in grants)),
        "expires_at": min((row.expires_at for row in grants if row.expires_at), default=None),
        "deposits": Money.nano(-balance(tenant.pk, Account.DEPOSITS)),
    }


def invoice_list(ctx: PageContext) -> ListPage:
    """Return a page of invoices, newest first, without drafts of the current month, which `upcoming` shows."""
    with all_tenants_scope(BypassReason.BILLING):  # periods and entities belong to no tenant
        page = keyset_page(
            ctx, _select_invoices(ctx), ctx.url("invoices"), PAGE_SIZE, filtered=filters(ctx).is_filtered
        )
        owed = owed_on(LedgerEntry.objects.for_tenant(ctx.tenant), page.rows)
    return replace(page, rows=[_row(ctx, row, owed[row.pk]) for row in page.rows], **TOOLS.table(ctx))


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips."""
    url = ctx.url("invoices")
    state, kind = (
        _read_choice(ctx, "state", Invoice.State.values),
        _read_choice(ctx, "type", Invoice.InvoiceType.values),
    )
    states = [(value, choice_label(label)) for value, label in Invoice.State.choices]
    kinds = [(value, choice_label(label)) for value, label in Invoice.InvoiceType.choices]
    return filter_bar(
        ctx,
        url,
        (
            choice_chip(ctx, url, "state", _("State"), states, state),
            choice_chip(ctx, url, "type", _("Type"), kinds, kind),
        ),
    )


def _read_choice(ctx: PageContext, name: str, values: Sequence[str]) -> str | None:
    return value if (value := ctx.query.get(name)) in values else None


def _select_invoices(ctx: PageContext) -> QuerySet[Invoice]:
    """Return the invoices that the filters of the page select."""
    rows = Invoice.objects.for_tenant(ctx.tenant).select_related("period", "entity", "refers_to")
    rows = rows.exclude(state=Invoice.State.DRAFT, complete=False)
    if state := _read_choice(ctx, "state", Invoice.State.values):
        rows = rows.filter(state=state)
    if kind := _read_choice(ctx, "type", Invoice.InvoiceType.values):
        rows = rows.filter(invoice_type=kind)
    return rows


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the newest invoices with the page's filters. Amounts of credit notes are negative."""
    with all_tenants_scope(BypassReason.BILLING):
        rows = list(_select_invoices(ctx).order_by("-pk")[:MAX_EXPORTED])
        owed = owed_on(LedgerEntry.objects.for_tenant(ctx.tenant), rows)
    for row in rows:
        amounts = [amount.exact for amount in signed_amounts(row)]
        due = balance_due_of(row, owed[row.pk])
        yield (
            *(row.number or "", row.invoice_type, row.state, row.period.label, row.currency, *amounts),
            due and due.exact,
            row.issued_at.isoformat() if row.issued_at else None,
            row.due_on,
            row.refers_to.number if row.refers_to else None,
        )


TOOLS = ListTools(
    "invoices",
    exported=(
        *("number", "type", "state", "period", "currency", "subtotal", "total", "balance_due", "issued_at", "due_on"),
        "refers_to",
    ),
    rows=export_rows,
    columns={
        "period": _lazy("Period"),
        "state": _lazy("State"),
        "issued": _lazy("Issued"),
        "due": _lazy("Due"),
        "total": _lazy("#Total"),
        "owed": _lazy("#Balance due"),
        "download": _lazy("!Download"),
    },
    views=((_lazy("All"), {}), (_lazy("Open"), {"state": "open"}), (_lazy("Paid"), {"state": "paid"})),
)


def _row(ctx: PageContext, invoice: Invoice, owed: Money) -> dict[str, Any]:
    """Return an invoice with its state and its balance due, which drafts and credit notes do not have."""
    return {
        "invoice": invoice,
        "month": day_text(invoice.period.starts_at.astimezone(ZoneInfo(invoice.entity.time_zone)), "F Y"),
        "state": state_of(invoice, today_of(invoice, ctx.now), owed),
        "owed": balance_due_of(invoice, owed),
        "final": invoice.state != Invoice.State.DRAFT,
    }


def find_invoices(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield invoices and credit notes by number; for operators, those of all tenants."""
    invoices, name = Invoice.objects, "operator-billing-detail" if ctx.access is None else "invoices-detail"
    rows = invoices.all_tenants() if ctx.access is None else invoices.for_tenant(ctx.tenant)
    found = rows.filter(number__icontains=typed).select_related("tenant").order_by("-pk")
    for row in found[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(str(row.number), ctx.url(name, row.pk), "invoices", row.tenant.name)
