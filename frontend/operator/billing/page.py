"""A month's invoices, compared with the ledger and the usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.db.models import Count, Q, QuerySet, Sum
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from billing.currencies.amounts import DEFAULT_CURRENCY, nano_a_cent
from billing.invoicing.lines import find_usage, select_usage
from billing.metering.archives import require_usage
from billing.models import Account, Invoice, InvoiceLine, LedgerEntry, Period
from billing.periods import close_after
from billing.pricing.currencies import other_currencies
from frontend.core.backend_messages import translate_message
from frontend.core.filter_chips import choice_chip, filter_bar, text_chip
from frontend.core.languages import lazy_text as _lazy
from frontend.core.languages import month_text
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import Choice, ListPage, changed_url, number_param, text_param
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.operator.billing import reports
from frontend.tenant.invoices.states import (
    OpenBalances,
    balance_due_of,
    open_balances,
    owed_on,
    signed_amounts,
    state_of,
    today_of,
)
from tenants.actions import Conflict

MONTHS = 6
PAGE_SIZE = 50
MAX_PAGE = 10**5
STATES = {
    "draft": _lazy("Draft"),
    "open": _lazy("Open"),
    "paid": _lazy("Paid"),
    "void": _lazy("Void"),
    "uncollectible": _lazy("Uncollectible"),
}


def month_of(ctx: PageContext) -> str:
    """Return the month in the URL; otherwise the newest one that has ended, or the newest one."""
    return ctx.once("month", lambda: _month(ctx))


def _month(ctx: PageContext) -> str:
    text = ctx.query.get("month", "")
    labels = _labels()
    if text in labels:
        return text
    over = Period.objects.filter(ends_at__lte=ctx.now).order_by("-label").values_list("label", flat=True).first()
    return over or (labels[0] if labels else f"{ctx.now:%Y-%m}")


def _labels() -> list[str]:
    return list(Period.objects.order_by("-label").values_list("label", flat=True).distinct())


def filters(ctx: PageContext) -> dict[str, Any]:
    month, url, state = month_of(ctx), ctx.url("operator-billing"), ctx.query.get("state", "")
    labels = _labels()
    near = [label for label in labels[:MONTHS] if label != month] + [month]
    months = [
        Choice(month_text(label), changed_url(ctx, url, month=label), label == month)
        for label in sorted(near, reverse=True)
    ]
    chips = (choice_chip(ctx, url, "state", _("State"), STATES.items(), state if state in STATES else None),)
    bar = filter_bar(ctx, url, chips, text_chip(ctx, url, "tenant", _("Tenant or number")))
    return {"months": months, "bar": bar, "month": month}


def runs(ctx: PageContext) -> list[dict[str, Any]]:
    """Return the month for each billing entity, with its status and its number of complete drafts."""
    periods = Period.objects.filter(label=month_of(ctx)).select_related("entity").order_by("entity__name", "pk")
    waiting = Invoice.objects.all_tenants().filter(state=Invoice.State.DRAFT, complete=True).order_by()
    counts = dict(waiting.values_list("period_id").annotate(Count("pk")))
    return [_run(ctx, period, counts.get(period.pk, 0)) for period in periods]


def _run(ctx: PageContext, period: Period, drafts: int) -> dict[str, Any]:
    over = period.ends_at + close_after() <= ctx.now
    if not over:
        message, kind = _("Current month. Drafts are previews and cannot be finalized."), "info"
    elif period.closed_at is None:
        message, kind = _("The month has ended. Late usage is added until it is closed."), "warn"
    elif drafts:
        message, kind = _drafts_left(drafts), "warn"
    elif period.invoiced_at is None:
        message, kind = _("Closed. No drafts to finalize."), ""
    else:
        message, kind = _("Closed. All tenants are invoiced."), "good"
    links = reports.links_of(ctx, period)
    return {"period": period, "message": message, "kind": kind, "drafts": drafts, "reports": links}


def _drafts_left(number: int) -> str:
    text = ngettext("Closed. %(number)s draft to finalize.", "Closed. %(number)s drafts to finalize.", number)
    return text % {"number": number}


def _invoices(ctx: PageContext) -> QuerySet[Invoice]:
    return Invoice.objects.all_tenants().filter(period__label=month_of(ctx))


def stats(ctx: PageContext) -> dict[str, Any]:
    """Return the number and the sum of the invoices in each state, and the balance due."""
    rows = _invoices(ctx).filter(invoice_type=Invoice.InvoiceType.INVOICE)
    totals = rows.order_by().values_list("currency", "state").annotate(Count("pk"), Sum("total"))
    found = {(currency, state): (count, total or 0) for currency, state, count, total in totals}
    currencies = sorted({DEFAULT_CURRENCY, *(currency for currency, _ in found)}, key=lambda code: code != "USD")
    opened = open_balances(LedgerEntry.objects.all_tenants(), rows, ctx.now)
    return {
        "sums": [
            (label if currency == DEFAULT_CURRENCY else f"{label}, {currency}", count, Money.cents(total, currency))
            for currency in currencies
            for state, label in STATES.items()
            for count, total in [found.get((currency, state), (0, 0))]
            if count or currency == DEFAULT_CURRENCY
        ],
        "owed": [_owed_in(currency, opened) for currency in currencies],
        "past_due": opened.past_due,
    }


def _owed_in(currency: str, opened: OpenBalances) -> Money:
    rows = (row for row in opened.invoices if row.currency == currency)
    return Money(sum(opened.owed[row.pk].femto for row in rows), currency)


def invoice_list(ctx: PageContext) -> ListPage:
    """Return a page of the month's invoices, ordered by tenant."""
    page = min(number_param(ctx, "page") or 0, MAX_PAGE)
    start = page * PAGE_SIZE
    found = list(_select_invoices(ctx)[start : start + PAGE_SIZE + 1])
    shown = found[:PAGE_SIZE]
    owed, booked = owed_on(LedgerEntry.objects.all_tenants(), shown), _ledger_totals(shown)
    return ListPage(
        [_row(ctx, row, owed[row.pk], booked.get(row.pk)) for row in shown],
        older_url=changed_url(ctx, "", page=page + 1) if len(found) > PAGE_SIZE else "",
        newest_url=changed_url(ctx, "") if start else "",
        columns=TOOLS.read_columns(ctx),
        headings=TOOLS.headings(ctx),
    )


def _select_invoices(ctx: PageContext) -> QuerySet[Invoice]:
    """Return the invoices that the filters of the page select, ordered by tenant."""
    rows = _invoices(ctx).select_related("tenant", "entity", "period", "refers_to")
    state, typed = ctx.query.get("state", ""), text_param(ctx, "tenant")
    if state in STATES:
        rows = rows.filter(state=state)
    if typed:
        rows = rows.filter(Q(tenant__name__icontains=typed) | Q(tenant__slug__icontains=typed) | Q(number=typed))
    return rows.order_by("tenant__name", "tenant_id", "pk")


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the month's invoices with the page's filters. Call inside `ctx.scope()`."""
    rows = list(_select_invoices(ctx)[:MAX_EXPORTED])
    owed, booked = owed_on(LedgerEntry.objects.all_tenants(), rows), _ledger_totals(rows)
    for invoice in rows:
        row = _row(ctx, invoice, owed[invoice.pk], booked.get(invoice.pk))
        matches = None if row["agrees"] is None else "yes" if row["agrees"] else "no"
        yield (
            *(invoice.tenant.slug, invoice.number or "", invoice.invoice_type, invoice.state, invoice.period.label),
            *(invoice.currency, row["subtotal"].exact, row["total"].exact, row["owed"] and row["owed"].exact),
            *(invoice.due_on, matches),
        )


TOOLS = ListTools(
    "operator-billing",
    exported=(
        *("tenant", "number", "type", "state", "period", "currency", "subtotal", "total", "balance_due", "due_on"),
        "ledger_match",
    ),
    rows=export_rows,
    columns={
        "state": _lazy("State"),
        "due": _lazy("Due"),
        "subtotal": _lazy("#Subtotal"),
        "total": _lazy("#Total"),
        "owed": _lazy("#Balance due"),
        "ledger": _lazy("Ledger match"),
        "actions": _lazy("!Actions"),
    },
)


def _ledger_totals(rows: list[Invoice]) -> Mapping[int, bool]:
    """Return whether the ledger's revenue of each invoice, or the sold credit, equals the sum of its lines."""
    final = {row.pk: row for row in rows if row.state != Invoice.State.DRAFT}
    if not final:
        return {}
    keys = [f"invoice:{pk}" for pk in final]
    accounts = (Account.REVENUE, Account.CREDITS)
    entries = LedgerEntry.objects.all_tenants().filter(transaction__key__in=keys, account__in=accounts).order_by()
    sums = entries.values_list("invoice_id", "account").annotate(Sum("nano"))
    earned = {(invoice_id, account): int(nano) for invoice_id, account, nano in sums}
    lines = InvoiceLine.objects.all_tenants().filter(invoice__in=final).order_by()
    lined = dict(lines.values_list("invoice_id").annotate(Sum("cents")))
    return {
        pk: _matches_ledger(row, earned.get((pk, accounts[row.sells_credit]), 0), int(lined.get(pk, 0)))
        for pk, row in final.items()
    }


def _matches_ledger(row: Invoice, earned_nano: int, lined_cents: int) -> bool:
    sign = 1 if row.is_credit_note else -1
    return lined_cents == row.subtotal and sign * earned_nano == row.booked_revenue * nano_a_cent(row.currency)


def _row(ctx: PageContext, row: Invoice, owed: Money, agrees: bool | None) -> dict[str, Any]:
    """Return an invoice with its state. `agrees`: whether ledger and lines are equal; None before booking."""
    subtotal, total = signed_amounts(row)
    return {
        "invoice": row,
        "state": state_of(row, today_of(row, ctx.now), owed),
        "subtotal": subtotal,
        "total": total,
        "owed": balance_due_of(row, owed),
        "agrees": agrees,
        "can_finalize": row.state == Invoice.State.DRAFT and row.complete,
    }


def comparison(ctx: PageContext) -> dict[str, Any]:
    """Compare the usage lines of each invoice with the usage events of its month, in one statement for all tenants."""
    periods = list(Period.objects.filter(label=month_of(ctx)).select_related("entity"))
    usage = {period.pk: find_usage(period) for period in periods}
    try:
        for period in periods:
            require_usage(period.pk)
    except Conflict as exc:
        return {"message": translate_message(exc), "differences": ()}
    standing = _invoices(ctx).filter(invoice_type=Invoice.InvoiceType.INVOICE).exclude(state=Invoice.State.VOID)
    rows = list(standing.select_related("tenant"))
    lines = InvoiceLine.objects.all_tenants().filter(invoice__in=[row.pk for row in rows], price_id__isnull=False)
    billed = dict(lines.order_by().values_list("invoice_id").annotate(Sum("femto")))
    differences = []
    for row in rows:
        uses = usage[row.period_id].get(row.tenant_id, [])
        was = sum(use.femto for use in select_usage(Invoice.InvoiceType.INVOICE, uses))
        if was != int(billed.get(row.pk, 0)):
            differences.append((row, Money(int(billed.get(row.pk, 0)), row.currency), Money(was, row.currency)))
    others = other_currencies()
    everything: dict[str, int] = {DEFAULT_CURRENCY: 0}
    for tenant_id, uses in (item for amount in usage.values() for item in amount.items()):
        currency = others.get(tenant_id, DEFAULT_CURRENCY)
        everything[currency] = everything.get(currency, 0) + sum(use.femto for use in uses)
    return {
        "message": "",  # the reason why they were not compared
        "at": ctx.now,
        "invoices": len(rows),
        "same": len(rows) - len(differences),
        "differences": differences,
        "usage": [Money(femto, currency) for currency, femto in everything.items()],
    }
