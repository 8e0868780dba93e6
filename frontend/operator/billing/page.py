"""View models of a month's invoices, compared with the ledger and the usage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Literal
from urllib.parse import urlencode

from django.db.models import Count, Q, QuerySet, Sum

from billing.actions.drafts import close_after
from billing.amounts import NANO_A_CENT
from billing.invoicing.lines import used, wanted
from billing.metering.archives import require_usage
from billing.models import Account, Invoice, InvoiceLine, LedgerEntry, Period
from frontend.core.date_ranges import DateRangeChoice
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.invoices.states import State, owed_on, state_of, today_of
from tenants.actions import Conflict

MONTHS = 6
PAGE_SIZE = 50
STATES = {"": "All", "draft": "Draft", "open": "Open", "paid": "Paid", "void": "Void", "uncollectible": "Uncollectible"}


@dataclass(frozen=True)
class Run:
    """The status of a month, and its next step."""

    pk: int
    month: str
    entity: str
    message: str
    kind: Literal["good", "warn", "info", ""]
    drafts: int
    draft_url: str  # empty if it is not possible
    finalize_url: str


@dataclass(frozen=True)
class BillingRunFilters:
    months: tuple[DateRangeChoice, ...]
    states: tuple[DateRangeChoice, ...]
    month: str
    tenant: str
    state: str


@dataclass(frozen=True)
class Runs:
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class InvoiceSum:
    label: str
    count: int
    amount: Money


@dataclass(frozen=True)
class BillingRunStats:
    sums: tuple[InvoiceSum, ...]
    owed: Money
    past_due: int


@dataclass(frozen=True)
class BillingRunRow:
    name: str
    what: str
    url: str
    tenant: str
    slug: str
    credit_url: str
    state: State
    due_on: date | None
    subtotal: Money
    total: Money
    owed: Money | None
    booked: Literal["", "agree", "differ"]  # whether ledger and lines are equal; empty before booking
    finalize_url: str


@dataclass(frozen=True)
class BillingRunList:
    rows: tuple[BillingRunRow, ...]
    older_url: str
    first_url: str


@dataclass(frozen=True)
class BillingRunDifference:
    name: str
    url: str
    tenant: str
    billed: Money
    used: Money


@dataclass(frozen=True)
class BillingComparison:
    """The comparison of a month's invoices with its usage. `message`: the reason why they were not compared."""

    at: datetime
    invoices: int
    same: int
    differences: tuple[BillingRunDifference, ...]
    usage: Money
    message: str


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


def filters(ctx: PageContext) -> BillingRunFilters:
    month, state, tenant = month_of(ctx), ctx.query.get("state", ""), ctx.query.get("tenant", "")
    labels = _labels()
    near = [label for label in labels[:MONTHS] if label != month] + [month]
    params = {name: value for name, value in ctx.query.items() if name in ("state", "tenant") and value}
    months = tuple(
        DateRangeChoice(label, f"?{urlencode({**params, 'month': label})}", label == month)
        for label in sorted(near, reverse=True)
    )
    here = {"month": month} | ({"tenant": tenant} if tenant else {})
    states = tuple(
        DateRangeChoice(label, f"?{urlencode(here | ({'state': name} if name else {}))}", name == state)
        for name, label in STATES.items()
    )
    return BillingRunFilters(months, states, month, tenant, state)


def runs(ctx: PageContext) -> Runs:
    """Return the month for each billing entity."""
    periods = Period.objects.filter(label=month_of(ctx)).select_related("entity").order_by("entity__name", "pk")
    waiting = Invoice.objects.all_tenants().filter(state=Invoice.State.DRAFT, complete=True).order_by()
    counts = dict(waiting.values_list("period_id").annotate(Count("pk")))
    return Runs(tuple(_run(ctx, period, counts.get(period.pk, 0)) for period in periods))


def _run(ctx: PageContext, period: Period, drafts: int) -> Run:
    over = period.ends_at + close_after() <= ctx.now
    kind: Literal["good", "warn", "info", ""]
    if not over:
        message, kind = "Current month. Drafts are previews and cannot be finalized.", "info"
    elif period.closed_at is None:
        message, kind = "The month has ended. Late usage is added until it is closed.", "warn"
    elif drafts:
        message, kind = f"Closed. {drafts} draft{'' if drafts == 1 else 's'} to finalize.", "warn"
    elif period.invoiced_at is None:
        message, kind = "Closed. No drafts to finalize.", ""
    else:
        message, kind = "Closed. All tenants are invoiced.", "good"
    return Run(
        period.pk,
        period.label,
        period.entity.name,
        message,
        kind,
        drafts,
        ctx.url("operator-billing-draft", period.pk),
        ctx.url("operator-billing-finalize-all", period.pk) if drafts else "",
    )


def _invoices(ctx: PageContext) -> QuerySet[Invoice]:
    return Invoice.objects.all_tenants().filter(period__label=month_of(ctx))


def stats(ctx: PageContext) -> BillingRunStats:
    rows = _invoices(ctx).filter(invoice_type=Invoice.InvoiceType.INVOICE)
    found = {
        state: (count, total or 0)
        for state, count, total in rows.order_by().values_list("state").annotate(Count("pk"), Sum("total"))
    }
    sums = tuple(
        InvoiceSum(label, found.get(state, (0, 0))[0], Money.cents(int(found.get(state, (0, 0))[1])))
        for state, label in STATES.items()
        if state
    )
    opened = list(rows.filter(state=Invoice.State.OPEN).only("pk", "due_on"))
    owed = owed_on(LedgerEntry.objects.all_tenants(), opened)
    late = sum(row.due_on is not None and row.due_on < ctx.now.date() for row in opened)
    return BillingRunStats(sums, Money(sum(amount.femto for amount in owed.values())), late)


def invoice_list(ctx: PageContext) -> BillingRunList:
    """Return a page of the month's invoices, ordered by tenant."""
    rows = _invoices(ctx).select_related("tenant", "entity", "period")
    state, typed = ctx.query.get("state", ""), ctx.query.get("tenant", "").strip()[:100].replace("\0", "")
    if state in STATES and state:
        rows = rows.filter(state=state)
    if typed:
        rows = rows.filter(Q(tenant__name__icontains=typed) | Q(tenant__slug__icontains=typed) | Q(number=typed))
    page = ctx.query.get("page", "")
    start = int(page) * PAGE_SIZE if page.isascii() and page.isdigit() and len(page) < 6 else 0
    found = list(rows.order_by("tenant__name", "tenant_id", "pk")[start : start + PAGE_SIZE + 1])
    shown = found[:PAGE_SIZE]
    owed, booked = owed_on(LedgerEntry.objects.all_tenants(), shown), _ledger_totals(shown)
    params = {name: value for name, value in ctx.query.items() if name != "page"}
    older = f"?{urlencode({**params, 'page': start // PAGE_SIZE + 1})}" if len(found) > PAGE_SIZE else ""
    return BillingRunList(
        tuple(_row(ctx, row, owed[row.pk], booked.get(row.pk)) for row in shown),
        older,
        f"?{urlencode(params)}" if start else "",
    )


def _ledger_totals(rows: list[Invoice]) -> Mapping[int, bool]:
    """Return whether the ledger's revenue of each invoice equals the sum of its lines."""
    final = {row.pk: row for row in rows if row.state != Invoice.State.DRAFT}
    if not final:
        return {}
    keys = [f"invoice:{pk}" for pk in final]
    entries = LedgerEntry.objects.all_tenants().filter(transaction__key__in=keys, account=Account.REVENUE).order_by()
    earned = dict(entries.values_list("invoice_id").annotate(Sum("nano")))
    lines = InvoiceLine.objects.all_tenants().filter(invoice__in=final).order_by()
    lined = dict(lines.values_list("invoice_id").annotate(Sum("cents")))
    return {pk: _matches_ledger(row, int(earned.get(pk, 0)), int(lined.get(pk, 0))) for pk, row in final.items()}


def _matches_ledger(row: Invoice, earned_nano: int, lined_cents: int) -> bool:
    billed = row.taxable if row.is_credit_note else row.subtotal
    sign = 1 if row.is_credit_note else -1
    return lined_cents == row.subtotal and sign * earned_nano == billed * NANO_A_CENT


def _row(ctx: PageContext, row: Invoice, owed: Money, agrees: bool | None) -> BillingRunRow:
    final, sign = row.state != Invoice.State.DRAFT, -1 if row.is_credit_note else 1
    return BillingRunRow(
        row.number or "Draft",
        "Credit note" if row.is_credit_note else "Invoice",
        ctx.url("operator-billing-detail", row.pk),
        row.tenant.name,
        row.tenant.slug,
        ctx.url("operator-billing-credit", row.tenant.slug),
        state_of(row, today_of(row, ctx.now), owed),
        row.due_on,
        Money.cents(sign * row.subtotal),
        Money.cents(sign * row.total),
        owed if final and not row.is_credit_note else None,
        "" if agrees is None else "agree" if agrees else "differ",
        ctx.url("operator-billing-finalize", row.pk) if not final and row.complete else "",
    )


def comparison(ctx: PageContext) -> BillingComparison:
    """Compare the usage lines of each invoice with the usage events of its month, in one statement for all tenants."""
    periods = list(Period.objects.filter(label=month_of(ctx)).select_related("entity"))
    usage = {period.pk: used(period) for period in periods}
    try:
        for period in periods:
            require_usage(period.pk)
    except Conflict as exc:
        return BillingComparison(ctx.now, 0, 0, (), Money(0), str(exc))
    standing = _invoices(ctx).filter(invoice_type=Invoice.InvoiceType.INVOICE).exclude(state=Invoice.State.VOID)
    rows = list(standing.select_related("tenant"))
    lines = InvoiceLine.objects.all_tenants().filter(invoice__in=[row.pk for row in rows], price_id__isnull=False)
    billed = dict(lines.order_by().values_list("invoice_id").annotate(Sum("femto")))
    differences = []
    for row in rows:
        uses = usage[row.period_id].get(row.tenant_id, [])
        was = sum(use.femto for use in wanted(Invoice.InvoiceType.INVOICE, uses))
        if was != int(billed.get(row.pk, 0)):
            url = ctx.url("operator-billing-detail", row.pk)
            found = Money(int(billed.get(row.pk, 0)))
            differences.append(BillingRunDifference(row.number or "Draft", url, row.tenant.name, found, Money(was)))
    everything = sum(use.femto for amount in usage.values() for uses in amount.values() for use in uses)
    return BillingComparison(
        ctx.now, len(rows), len(rows) - len(differences), tuple(differences), Money(everything), ""
    )
