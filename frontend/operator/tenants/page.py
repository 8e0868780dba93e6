"""View models of the list of tenants. Filters, order and page are in the URL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.db.models import Q

from billing.metering.usage import this_month
from billing.models import Commitment, PriceBook, PriceBookAssignment
from frontend.core.numbers import Margin, Money
from frontend.core.page_context import PageContext
from frontend.operator.tenants import spending
from frontend.operator.tenants.spending import BudgetText, Spent
from millrace.apps.operations.budget_usage import highest_budgets, tenants_near_limits
from tenants.models import Tenant

PAGE_SIZE = 50
USUAL = "-spend"
VIEWS = (("", "All"), ("active", "Active"), ("near", "Near a limit"), ("suspended", "Suspended"), ("purged", "Purged"))
SORTS = (
    ("name", "Tenant", ""),
    ("", "Plan", ""),
    ("spend", "Spend", "numeric"),
    ("margin", "Margin", "numeric"),
    ("limit", "Highest budget usage", ""),
    ("requests", "Requests", "numeric"),
    ("", "Status", ""),
    ("since", "Since", "numeric"),
)


@dataclass(frozen=True)
class TenantAdminRow:
    """One tenant. `budget` is the one with the highest usage; `margin` is None if costs are unknown."""

    tenant: Tenant
    url: str
    plan: str
    commitments: str
    used: Spent
    margin: Margin | None
    budget: BudgetText | None
    is_near: bool  # near or at a limit
    is_at_limit: bool

    @property
    def spend(self) -> Money:
        return Money(self.used.femto)

    @property
    def status_label(self) -> str:
        return "Purge scheduled" if self.tenant.purge_after else self.tenant.get_status_display()


@dataclass(frozen=True)
class Heading:
    label: str
    kind: str
    url: str  # empty if it cannot be sorted
    order: str  # "ascending", "descending" or ""


@dataclass(frozen=True)
class TenantAdminChoice:
    label: str
    url: str
    is_chosen: bool


@dataclass(frozen=True)
class TenantAdminList:
    headings: tuple[Heading, ...]
    rows: tuple[TenantAdminRow, ...]
    has_margin: bool
    first: int
    last: int
    number: int
    newer_url: str
    older_url: str
    filtered: bool
    new_url: str


@dataclass(frozen=True)
class TenantSums:
    """Sums over all tenants that are not purged."""

    active: int
    suspended: int
    near: int
    full: int
    spend: Money
    margin: Margin | None
    month: datetime


@dataclass(frozen=True)
class TenantAdminFilters:
    """Values of the filter form."""

    typed: str
    chosen: str
    sort: str
    choices: tuple[TenantAdminChoice, ...]


_KEYS: dict[str, Callable[[TenantAdminRow], Any]] = {
    "name": lambda row: row.tenant.name.casefold(),
    "spend": lambda row: row.used.femto,
    "margin": lambda row: -(10**30) if row.margin is None else row.margin.amount.femto,
    "limit": lambda row: _usage(row.budget),
    "requests": lambda row: row.used.requests,
    "since": lambda row: row.tenant.created_at,
}


def filters(ctx: PageContext) -> TenantAdminFilters:
    chosen = ctx.query.get("show", "")
    choices = (TenantAdminChoice(label, _url(ctx, show=name, page=""), name == chosen) for name, label in VIEWS)
    return TenantAdminFilters(_typed(ctx), chosen, ctx.query.get("sort", ""), tuple(choices))


def stats(ctx: PageContext) -> TenantSums:
    rows = [row for row in _all(ctx) if row.tenant.status != Tenant.Status.PURGED]
    return TenantSums(
        active=sum(not row.tenant.is_suspended for row in rows),
        suspended=sum(row.tenant.is_suspended for row in rows),
        near=sum(row.is_near for row in rows),
        full=sum(row.is_at_limit for row in rows),
        spend=Money(sum(row.used.femto for row in rows)),
        margin=spending.sum_margins(row.margin for row in rows),
        month=this_month(ctx.now)[0],
    )


def tenant_list(ctx: PageContext) -> TenantAdminList:
    """Return the selected page of tenants."""
    found = [row for row in _all(ctx) if _is_shown(row, ctx.query.get("show", ""), _typed(ctx).casefold())]
    sort = ctx.query.get("sort", "")
    sort = sort if sort.removeprefix("-") in _KEYS else USUAL
    found.sort(key=_KEYS["name"])
    found.sort(key=_KEYS[sort.removeprefix("-")], reverse=sort.startswith("-"))
    page = min(_number(ctx.query.get("page", "")), max(1, -(-len(found) // PAGE_SIZE)))
    shown = found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
    has_margin = any(row.margin is not None for row in found)
    return TenantAdminList(
        headings=tuple(_heading(ctx, *name, sort) for name in SORTS if has_margin or name[0] != "margin"),
        rows=tuple(shown),
        has_margin=has_margin,
        first=(page - 1) * PAGE_SIZE + 1,
        last=(page - 1) * PAGE_SIZE + len(shown),
        number=len(found),
        newer_url=_url(ctx, page=str(page - 1)) if page > 1 else "",
        older_url=_url(ctx, page=str(page + 1)) if page * PAGE_SIZE < len(found) else "",
        filtered=bool(_typed(ctx) or ctx.query.get("show")),
        new_url=ctx.url("operator-tenants-new"),
    )


def _all(ctx: PageContext) -> list[TenantAdminRow]:
    """Return all tenants, loaded once per page with a constant number of queries."""
    return ctx.once("operator-tenants", lambda: _tenant_rows(ctx))


def _tenant_rows(ctx: PageContext) -> list[TenantAdminRow]:
    start, now = this_month(ctx.now)
    used, rates = spending.spent(start), spending.token_costs(now)
    highest, near = highest_budgets(now), tenants_near_limits(now)
    enforced = {tenant: BudgetText(budget) for tenant, (budget,) in highest.items() if budget.mode != "dry_run"}
    books = dict(PriceBookAssignment.objects.all_tenants().values_list("tenant_id", "book__name"))
    agreed = commitments(now)
    none = Spent()
    return [
        TenantAdminRow(
            tenant=tenant,
            url=ctx.url("operator-tenants-detail", tenant.pk),
            plan=books.get(tenant.pk, PriceBook.LIST),
            commitments=", ".join(agreed[tenant.pk]),
            used=used.get(tenant.pk, none),
            margin=spending.margin(used[tenant.pk], rates) if tenant.pk in used else None,
            budget=enforced.get(tenant.pk),
            is_near=tenant.pk in near,
            is_at_limit=tenant.pk in near and near[tenant.pk].budget.is_at_limit,
        )
        for tenant in Tenant.objects.all_tenants()
    ]


def commitments(now: datetime) -> Mapping[int, list[str]]:
    """Return the names of this month's commitments by tenant."""
    month = f"{now:%Y-%m}"
    rows = Commitment.objects.all_tenants().filter(Q(last_month="") | Q(last_month__gte=month), first_month__lte=month)
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


def _heading(ctx: PageContext, name: str, label: str, kind: str, sort: str) -> Heading:
    if not name:
        return Heading(label, kind, "", "")
    down = sort == f"-{name}" or (sort != name and name == "name")
    order = {name: "ascending", f"-{name}": "descending"}.get(sort, "")
    return Heading(label, kind, _url(ctx, sort=name if down else f"-{name}", page=""), order)


def _url(ctx: PageContext, **changes: str) -> str:
    """Return the URL of the page with these filters changed."""
    params = {name: ctx.query.get(name, "") for name in ("q", "show", "sort", "page")} | changes
    query = {name: value for name, value in params.items() if value}
    return f"{ctx.url('operator-tenants')}?{urlencode(query)}" if query else ctx.url("operator-tenants")


def _typed(ctx: PageContext) -> str:
    return ctx.query.get("q", "").strip()[:100]


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and int(text[:6]) > 0 else 1
