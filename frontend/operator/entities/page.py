"""Billing entities with their tax rules, and the sums of a month's journal."""

from __future__ import annotations

from typing import Any

from django.db.models import Count

from billing.accounting.charts import format_rate
from billing.accounting.journal import sum_accounts
from billing.currencies.amounts import FEMTO_A_NANO
from billing.models import Account, BillingEntity, ChartOfAccounts, Period, TaxRule
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import Choice, changed_url
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext, first_or_404
from frontend.operator.entities.forms import BUYERS, category_label

MONTHS = 6
ACCOUNTS = {
    Account.RECEIVABLE: _lazy("Receivables"),
    Account.CASH: _lazy("Cash"),
    Account.DEPOSITS: _lazy("Advance payments"),
    Account.CREDITS: _lazy("Unused credit"),
    Account.PROMOTIONS: _lazy("Promotional credit granted"),
    Account.COMMITMENTS: _lazy("Usage included in fees"),
    Account.REVENUE: _lazy("Revenue"),
    Account.TAX: _lazy("Tax"),
    Account.BREAKAGE: _lazy("Expired credit"),
    Account.BAD_DEBT: _lazy("Bad debt"),
}


def entity_of(ctx: PageContext) -> BillingEntity:
    """Return the billing entity in the URL, or raise Http404. Call inside `ctx.scope()`."""
    rows = BillingEntity.objects.filter(pk=ctx.arguments["entity"])
    return ctx.once("billing_entity", lambda: first_or_404(rows))


def entities(ctx: PageContext) -> list[BillingEntity]:
    """Return the billing entities, each with the number of its tax rules and of its tenants with billing details."""
    counts = {"rules": Count("taxrule", distinct=True), "profiles": Count("billingprofile", distinct=True)}
    return list(BillingEntity.objects.annotate(**counts).order_by("name", "pk"))


def tax_rules(ctx: PageContext) -> dict[str, Any]:
    entity = entity_of(ctx)
    rules = TaxRule.objects.filter(entity=entity).order_by("country", "region", "buyer", "-starts_on")
    rows = [(rule, BUYERS[rule.buyer], category_label(rule.category), format_rate(rule.rate_ppm)) for rule in rules]
    return {"entity": entity, "rows": rows}


def chart_of(ctx: PageContext) -> ChartOfAccounts | None:
    """Return the chart of accounts. Call inside `ctx.scope()`."""
    return ChartOfAccounts.objects.filter(entity=entity_of(ctx)).first()


def month_of(ctx: PageContext) -> str:
    """Return the month in the URL; otherwise the newest one that has ended, or the current one."""
    labels, wanted = _labels(ctx), ctx.query.get("month", "")
    ended = Period.objects.filter(entity=entity_of(ctx), ends_at__lte=ctx.now).order_by("-label")
    return wanted if wanted in labels else ended.values_list("label", flat=True).first() or labels[0]


def _labels(ctx: PageContext) -> list[str]:
    rows = Period.objects.filter(entity=entity_of(ctx)).order_by("-label").values_list("label", flat=True)
    return ctx.once("entity_months", lambda: list(rows) or [f"{ctx.now:%Y-%m}"])


def journal(ctx: PageContext) -> dict[str, Any]:
    """Return the debits and credits of the month by account and currency, with their totals."""
    entity, month = entity_of(ctx), month_of(ctx)
    sums = sum_accounts(entity, month)
    rows = [
        (ACCOUNTS[Account(row.account)], _money(row.debit, row.currency), _money(row.credit, row.currency))
        for row in sums
    ]
    totals = [
        (
            currency,
            _money(sum(row.debit for row in sums if row.currency == currency), currency),
            _money(sum(row.credit for row in sums if row.currency == currency), currency),
        )
        for currency in dict.fromkeys(row.currency for row in sums)
    ]
    url = ctx.url("operator-entities-detail", entity.pk)
    near = sorted({*_labels(ctx)[:MONTHS], month}, reverse=True)
    return {
        "entity": entity,
        "month": month,
        "months": [Choice(label, changed_url(ctx, url, month=label), label == month) for label in near],
        "rows": rows,
        "totals": totals,
        "chart": chart_of(ctx),
    }


def _money(nano: int, currency: str) -> Money:
    return Money(nano * FEMTO_A_NANO, currency)
