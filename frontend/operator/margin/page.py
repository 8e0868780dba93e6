"""The margin page, one function for each panel."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import Http404
from django.utils.translation import gettext as _

from billing.costs.margin import Group, MarginQuery, MarginRow, execution_costs, margins, month_of, revenues, total
from billing.metering.usage import TooManyRows
from billing.models import CostCard, DailyCost, ExecutionCost, UsageRollup
from frontend.core.filter_chips import choice_chip, filter_bar
from frontend.core.languages import lazy_text as _lazy
from frontend.core.languages import month_text
from frontend.core.lists import Choice, changed_url, text_param
from frontend.core.numbers import Margin, Money, common_places, share
from frontend.core.page_context import PageContext
from millrace.apps.deployments.served_deployments import served_specs
from tenants.models import Tenant

MONTHS = 6
MAX_LISTED = 200  # groups shown; the export has all
MAX_EXECUTIONS = 25
GROUPS: dict[str, tuple[str, tuple[Group, ...]]] = {
    "model": (_lazy("Deployment"), ("model",)),
    "tenant": (_lazy("Tenant"), ("tenant",)),
    "both": (_lazy("Tenant and deployment"), ("tenant", "model")),
}
DEFAULT_GROUP = "model"
_MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])")


@dataclass(frozen=True)
class MarginFilters:
    """The filters of the query string. `tenant` is None for all tenants, `model` empty for all deployments."""

    month: str
    group: str
    tenant: Tenant | None
    model: str

    @property
    def query(self) -> MarginQuery:
        tenant_id = None if self.tenant is None else self.tenant.pk
        return MarginQuery(self.month, self.month, tenant_id, self.model or None, GROUPS[self.group][1], True)

    @property
    def month_label(self) -> str:
        return month_text(self.month)


def filters_of(ctx: PageContext) -> MarginFilters:
    """Return the filters of the query string. Call inside `ctx.scope()`.

    Raises:
        Http404: the tenant does not exist.
    """

    def find() -> MarginFilters:
        month, group = ctx.query.get("month", ""), ctx.query.get("group", "")
        slug, tenant = text_param(ctx, "tenant"), None
        if slug:
            tenant = Tenant.objects.all_tenants().filter(slug=slug).first()
            if tenant is None:
                raise Http404
        return MarginFilters(
            month if _MONTH.fullmatch(month) else month_of(ctx.now.date()),
            group if group in GROUPS else DEFAULT_GROUP,
            tenant,
            text_param(ctx, "model"),
        )

    return ctx.once("margin-filters", find)


def filters(ctx: PageContext) -> dict[str, Any]:
    now, url = filters_of(ctx), ctx.url("operator-margin")
    near = [month_of(ctx.now.date())]
    while len(near) < MONTHS:
        near.append(_month_before(near[-1]))
    months = sorted({now.month, *near}, reverse=True)
    models = [row.model for row in _all_groups(now.month, "model") if row.model]
    used = [row.tenant_id for row in _all_groups(now.month, "tenant") if row.tenant_id is not None]
    tenants = Tenant.objects.all_tenants().filter(pk__in=used).order_by("name").values_list("slug", "name")
    return {
        "months": [
            Choice(month_text(month), changed_url(ctx, url, month=month), month == now.month) for month in months
        ],
        "groups": [
            Choice(name, changed_url(ctx, url, group=key), key == now.group) for key, (name, _names) in GROUPS.items()
        ],
        "bar": filter_bar(
            ctx,
            url,
            (
                choice_chip(ctx, url, "model", _("Deployment"), ((name, name) for name in models), now.model or None),
                choice_chip(ctx, url, "tenant", _("Tenant"), tenants, now.tenant.slug if now.tenant else None),
            ),
        ),
        "now": now,
    }


def _all_groups(month: str, group: Group) -> list[MarginRow]:
    """Return the deployments or tenants with usage or costs in a month, for the filters; none if there are too many."""
    try:
        return margins(MarginQuery(month, month, group_by=(group,), with_uncosted=True))
    except TooManyRows:
        return []


def stats(ctx: PageContext) -> dict[str, Any]:
    """Return the sums of the month."""
    sums = total(margins(filters_of(ctx).query))
    return {
        "sums": sums,
        "is_partial": _is_partly_costed(sums),
        "revenue": Money(sums.revenue_femto),
        "cost": Money(sums.cost_femto),
        "margin": Margin(sums.costed_revenue_femto, sums.cost_femto),
        "uncosted": Money(sums.uncosted_revenue_femto),
        "uncosted_share": share(sums.uncosted_revenue_femto, sums.revenue_femto),
        "failed": Money(sums.failed_femto),
        "unbilled": Money(sums.unbilled_femto),
    }


def groups(ctx: PageContext) -> dict[str, Any]:
    """Return a row for each group, the highest cost first."""
    now = filters_of(ctx)
    found = sorted(margins(now.query), key=lambda row: (-row.cost_femto, -row.revenue_femto))
    names = tenant_names(row.tenant_id for row in found)
    rows = [_row(ctx, row, names) for row in found[:MAX_LISTED]]
    amounts = [money for row in rows for money in (row["revenue"], row["cost"], row["margin"].amount)]
    return {
        "rows": rows,
        "label": GROUPS[now.group][0],
        "places": common_places(amounts),
        "unbilled_places": common_places(row["unbilled"] for row in rows),
        "others": len(found) - len(rows),
    }


def executions(ctx: PageContext) -> dict[str, Any]:
    """Return the newest executions with a booked cost."""
    costs = list(
        execution_costs(filters_of(ctx).query).order_by("-admitted_at", "-request_id", "-execution")[:MAX_EXECUTIONS]
    )
    earned, names = revenues(costs), tenant_names(row.tenant_id for row in costs)
    rows = [_execution(row, earned.get((row.request_id, row.execution)), names) for row in costs]
    amounts = [money for row in rows for money in (row["revenue"], row["cost"]) if money is not None]
    return {"rows": rows, "places": common_places(amounts)}


def is_deployment(model: str) -> bool:
    """Return whether the deployment is served, or has usage or costs. Call inside `ctx.scope()`."""
    return (
        any(spec.name == model for spec in served_specs())
        or DailyCost.objects.filter(model=model).exists()
        or UsageRollup.objects.all_tenants().filter(model=model).exists()
    )


def current_card(model: str, now: datetime) -> CostCard | None:
    """Return the active cost card of a deployment. Call inside `ctx.scope()`."""
    return CostCard.objects.filter(model=model, effective_from__lte=now).order_by("-effective_from", "-id").first()


def tenant_names(ids: Iterable[int | None]) -> dict[int, str]:
    wanted = {pk for pk in ids if pk is not None}
    return dict(Tenant.objects.all_tenants().filter(pk__in=wanted).values_list("pk", "name"))


def _row(ctx: PageContext, row: MarginRow, names: dict[int, str]) -> dict[str, Any]:
    return {
        "name": row.model or names.get(row.tenant_id or 0, _("tenant %(tenant_id)s") % {"tenant_id": row.tenant_id}),
        "detail": names.get(row.tenant_id, _("tenant %(tenant_id)s") % {"tenant_id": row.tenant_id})
        if row.model and row.tenant_id
        else "",
        "row": row,
        "revenue": Money(row.revenue_femto),
        "cost": Money(row.cost_femto),
        "uncosted": Money(row.uncosted_revenue_femto),
        "is_costed": row.costed > 0 and (row.cost_femto > 0 or not row.uncosted_tokens),
        "is_partial": _is_partly_costed(row),
        "failed": Money(row.failed_femto),
        "unbilled": Money(row.unbilled_femto),
        "margin": Margin(row.costed_revenue_femto, row.cost_femto),
    }


def _is_partly_costed(row: MarginRow) -> bool:
    """Return whether only some executions have a booked cost, such as those after the first cost card of the month."""
    return 0 < row.costed < row.executions


def _execution(row: ExecutionCost, revenue: int | None, names: dict[int, str]) -> dict[str, Any]:
    return {
        "cost_of": row,
        "tenant": names.get(row.tenant_id, _("tenant %(tenant_id)s") % {"tenant_id": row.tenant_id}),
        "revenue": None if revenue is None else Money(revenue),
        "cost": Money(int(row.cost_femto)),
        "margin": None if revenue is None else Margin(revenue, int(row.cost_femto)),
    }


def _month_before(month: str) -> str:
    year, number = map(int, month.split("-"))
    years, index = divmod(year * 12 + number - 2, 12)
    return f"{years:04}-{index + 1:02}"
