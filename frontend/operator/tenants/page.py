"""The list of tenants. Filters, order and page are in the URL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q

from billing.currencies.amounts import DEFAULT_CURRENCY
from billing.ledger.open_months import active_in
from billing.metering.usage import this_month
from billing.models import Commitment, PriceBook, PriceBookAssignment
from billing.pricing.currencies import dollar_rates
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import ListTools
from frontend.core.lists import Choice, changed_url, number_param, text_param
from frontend.core.numbers import Margin, Money, common_places
from frontend.core.page_context import PageContext
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult
from frontend.operator.tenants import spending
from frontend.operator.tenants.spending import BudgetText, Spent
from millrace.apps.health.budget_usage import highest_budgets, tenants_near_limits
from tenants.models import Tenant

PAGE_SIZE = 50
USUAL = "-spend"
VIEWS = (
    ("", _lazy("All")),
    ("active", _lazy("Active")),
    ("near", _lazy("Near a limit")),
    ("suspended", _lazy("Suspended")),
    ("purged", _lazy("Purged")),
)
SORTS = (
    ("name", _lazy("Tenant"), ""),
    ("", _lazy("Plan"), ""),
    ("spend", _lazy("Spend"), "numeric"),
    ("margin", _lazy("Margin"), "numeric"),
    ("limit", _lazy("Highest budget usage"), ""),
    ("requests", _lazy("Requests"), "numeric"),
    ("", _lazy("Status"), ""),
    ("since", _lazy("Since"), "numeric"),
)


@dataclass(frozen=True)
class TenantAdminRow:
    """One tenant. `budget` is the one with the highest usage; `margin` is None if costs are unknown."""

    tenant: Tenant
    plan: str
    commitments: str
    used: Spent
    margin: Margin | None
    budget: BudgetText | None
    is_near: bool  # near or at a limit
    is_at_limit: bool
    currency: str
    dollars: int  # the spend in femto-USD, to sort by; 0 without an exchange rate

    @property
    def spend(self) -> Money:
        return Money(self.used.femto, self.currency)


_KEYS: dict[str, Callable[[TenantAdminRow], Any]] = {
    "name": lambda row: row.tenant.name.casefold(),
    "spend": lambda row: (row.dollars, row.used.femto),
    "margin": lambda row: -(10**30) if row.margin is None else row.margin.amount.femto,
    "limit": lambda row: _usage(row.budget),
    "requests": lambda row: row.used.requests,
    "since": lambda row: row.tenant.created_at,
}


def filters(ctx: PageContext) -> dict[str, Any]:
    chosen = ctx.query.get("show", "")
    choices = [Choice(label, _url(ctx, show=name), name == chosen) for name, label in VIEWS]
    return {"typed": text_param(ctx, "q"), "chosen": chosen, "sort": ctx.query.get("sort", ""), "choices": choices}


def stats(ctx: PageContext) -> dict[str, Any]:
    """Return sums over all tenants that are not purged."""
    rows = [row for row in _all(ctx) if row.tenant.status != Tenant.Status.PURGED]
    return {
        "active": sum(not row.tenant.is_suspended for row in rows),
        "suspended": sum(row.tenant.is_suspended for row in rows),
        "near": sum(row.is_near for row in rows),
        "full": sum(row.is_at_limit for row in rows),
        "spend": _by_currency(rows),
        "margin": spending.sum_margins(row.margin for row in rows),
        "month": this_month(ctx.now)[0],
    }


def _by_currency(rows: list[TenantAdminRow]) -> list[Money]:
    """Return the spend in USD, then that in each other currency."""
    sums = {DEFAULT_CURRENCY: 0}
    for row in rows:
        sums[row.currency] = sums.get(row.currency, 0) + row.used.femto
    return [Money(femto, currency) for currency, femto in sums.items() if femto or currency == DEFAULT_CURRENCY]


def tenant_list(ctx: PageContext) -> dict[str, Any]:
    """Return the selected page of tenants."""
    found, sort = _select_tenants(ctx)
    page = min(max(number_param(ctx, "page") or 1, 1), max(1, -(-len(found) // PAGE_SIZE)))
    shown = found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
    currencies = {row.currency for row in shown}
    places = {
        currency: common_places(row.spend for row in shown if row.currency == currency) for currency in currencies
    }
    has_margin = any(row.margin is not None for row in found)
    return {
        "headings": [_heading(ctx, *name, sort) for name in SORTS if has_margin or name[0] != "margin"],
        "rows": [(row, places[row.currency]) for row in shown],
        "margin_places": common_places(row.margin.amount for row in shown if row.margin is not None),
        "has_margin": has_margin,
        "first": (page - 1) * PAGE_SIZE + 1,
        "last": (page - 1) * PAGE_SIZE + len(shown),
        "number": len(found),
        "newer_url": _url(ctx, page=page - 1) if page > 1 else "",
        "older_url": _url(ctx, page=page + 1) if page * PAGE_SIZE < len(found) else "",
        "filtered": bool(text_param(ctx, "q") or ctx.query.get("show")),
    }


def _select_tenants(ctx: PageContext) -> tuple[list[TenantAdminRow], str]:
    """Return the tenants that the filters of the page select, in its order, and that order."""
    found = [row for row in _all(ctx) if _is_shown(row, ctx.query.get("show", ""), text_param(ctx, "q").casefold())]
    sort = ctx.query.get("sort", "")
    sort = sort if sort.removeprefix("-") in _KEYS else USUAL
    found.sort(key=_KEYS["name"])
    found.sort(key=_KEYS[sort.removeprefix("-")], reverse=sort.startswith("-"))
    return found, sort


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield all tenants with the page's filters. Call inside `ctx.scope()`."""
    for row in _select_tenants(ctx)[0]:
        tenant = row.tenant
        yield (
            *(tenant.slug, tenant.name, tenant.status, row.plan, row.commitments, row.spend.exact),
            *(row.margin and row.margin.amount.exact, row.budget and row.budget.share, row.used.requests),
            tenant.created_at.isoformat(),
        )


TOOLS = ListTools(
    "operator-tenants",
    exported=(
        *("tenant", "name", "status", "plan", "commitments", "spend_this_month", "margin", "highest_budget_usage"),
        *("requests", "created_at"),
    ),
    rows=export_rows,
    columns={},
)


def _all(ctx: PageContext) -> list[TenantAdminRow]:
    """Return all tenants, loaded once per page with a constant number of queries."""
    return ctx.once("operator-tenants", lambda: _tenant_rows(ctx))


def _tenant_rows(ctx: PageContext) -> list[TenantAdminRow]:
    start, now = this_month(ctx.now)
    used, rates = spending.sum_usage(start), spending.token_costs(now)
    highest, near = highest_budgets(now), tenants_near_limits(now)
    books = {row.tenant_id: row.book for row in PriceBookAssignment.objects.all_tenants().select_related("book")}
    listed, dollars = PriceBook(name=PriceBook.LIST), dollar_rates(now.date())
    agreed = commitments(now)
    none, rows = Spent(), []
    for tenant in Tenant.objects.all_tenants():
        book, spend = books.get(tenant.pk, listed), used.get(tenant.pk, none)
        rate = dollars.get(book.currency)
        enforced = [budget for budget in highest.get(tenant.pk, ()) if budget.mode != "dry_run"]
        rows.append(
            TenantAdminRow(
                tenant=tenant,
                plan=book.name,
                commitments=", ".join(agreed[tenant.pk]),
                used=spend,
                margin=spending.margin(spend, rates, rate) if tenant.pk in used else None,
                budget=BudgetText(enforced[0], book.currency) if enforced else None,
                is_near=tenant.pk in near,
                is_at_limit=tenant.pk in near and near[tenant.pk].budget.is_at_limit,
                currency=book.currency,
                dollars=0 if rate is None else rate.convert(spend.femto),
            )
        )
    return rows


def commitments(now: datetime) -> Mapping[int, list[str]]:
    """Return the names of this month's commitments by tenant."""
    month = f"{now:%Y-%m}"
    rows = Commitment.objects.all_tenants().filter(active_in(month))
    found: dict[int, list[str]] = defaultdict(list)
    for tenant, name in rows.order_by("pk").values_list("tenant_id", "name"):
        found[tenant].append(name)
    return found


def _is_shown(row: TenantAdminRow, view: str, typed: str) -> bool:
    if view == "near":
        right = row.is_near
    elif view == "suspended":
        right = row.tenant.is_suspended and row.tenant.status != Tenant.Status.PURGED
    elif view == "active":
        right = not row.tenant.is_suspended
    else:
        right = (row.tenant.status == Tenant.Status.PURGED) == (view == "purged")
    return right and (typed in row.tenant.name.casefold() or typed in row.tenant.slug)


def _usage(budget: BudgetText | None) -> int:
    """Return a sort key for the used part of a budget."""
    if budget is None:
        return -1
    return budget.usage.used * 10_000 // budget.usage.limit if budget.usage.limit > 0 else 10**9


def _heading(ctx: PageContext, name: str, label: str, kind: str, sort: str) -> dict[str, str]:
    """Return a heading of the table. Its URL is empty if the column cannot be sorted."""
    if not name:
        return {"label": label, "kind": kind, "url": "", "order": ""}
    down = sort == f"-{name}" or (sort != name and name == "name")
    order = {name: "ascending", f"-{name}": "descending"}.get(sort, "")
    return {"label": label, "kind": kind, "url": _url(ctx, sort=name if down else f"-{name}"), "order": order}


def _url(ctx: PageContext, **changes: Any) -> str:
    return changed_url(ctx, ctx.url("operator-tenants"), **changes)


def find_tenants(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield tenants by name or slug."""
    rows = Tenant.objects.all_tenants().filter(Q(name__icontains=typed) | Q(slug__istartswith=typed))
    for tenant in rows.order_by("name")[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(tenant.name, ctx.url("operator-tenants-detail", tenant.pk), "tenants", tenant.slug)
