"""View models of the alerts page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.db.models import QuerySet
from django.urls import reverse
from django.utils.timesince import timesince

from billing.models import BudgetAlert, BudgetPeriod
from frontend.core.date_ranges import DateRangeChoice
from frontend.core.numbers import Money, compact, exact, share
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.alerts import BudgetDelivery, deliveries_of
from millrace.apps.operations.models import HealthEvent
from tenants.models import Tenant

PAGE_SIZE = 50
SHOWS = (("health", "Health"), ("budgets", "Budgets"))


@dataclass(frozen=True)
class OperatorAlertsQuery:
    show: str
    shows: tuple[DateRangeChoice, ...]
    only_open: bool
    states: tuple[DateRangeChoice, ...]


@dataclass(frozen=True)
class EventRow:
    title: str
    kind: str
    tenant: str
    urgent: bool
    opened_at: datetime
    closed_at: datetime | None
    lasted: str


@dataclass(frozen=True)
class OperatorAlertsAlertRow:
    tenant: str
    tenant_url: str
    budget: str
    threshold: str
    is_forecast: bool
    used: str
    limit: str
    part: str
    at: datetime
    period_start: datetime
    deliveries: tuple[BudgetDelivery, ...]


@dataclass(frozen=True)
class Page:
    rows: tuple[Any, ...]
    newer_url: str
    older_url: str


def query_of(ctx: PageContext) -> OperatorAlertsQuery:
    """Return the filters of the query string. The default list is health issues."""
    show = "budgets" if ctx.query.get("show") == "budgets" else "health"
    only_open = ctx.query.get("state") == "open"
    shows = tuple(
        DateRangeChoice(label, "?" if name == "health" else f"?show={name}", name == show) for name, label in SHOWS
    )
    states = (DateRangeChoice("All", "?", not only_open), DateRangeChoice("Open", "?state=open", only_open))
    return OperatorAlertsQuery(show, shows, only_open, states)


def events(ctx: PageContext) -> Page:
    """Return health events, newest first."""
    rows = HealthEvent.objects.all()
    if query_of(ctx).only_open:
        rows = rows.filter(closed_at__isnull=True)
    found, newer, older = _page(ctx, rows)
    ids = {row.tenant_id for row in found if row.tenant_id is not None}
    names = dict(Tenant.objects.all_tenants().filter(pk__in=ids).values_list("pk", "name"))
    return Page(tuple(_event(ctx, row, names.get(row.tenant_id, "")) for row in found), newer, older)


def alerts(ctx: PageContext) -> Page:
    """Return the budget alerts of all tenants, newest first."""
    rows = BudgetAlert.objects.all_tenants().select_related("budget", "email", "budget_period", "tenant")
    found, newer, older = _page(ctx, rows)
    deliveries = deliveries_of(found, None)
    return Page(tuple(_alert(row, deliveries[row.pk]) for row in found), newer, older)


def _page(ctx: PageContext, rows: QuerySet[Any]) -> tuple[list[Any], str, str]:
    """Return up to PAGE_SIZE rows, and the URLs of the newer and older ones."""
    before, after = _number(ctx, "before"), _number(ctx, "after")
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("pk")[: PAGE_SIZE + 1])
        newer, older, found = len(found) > PAGE_SIZE, True, found[:PAGE_SIZE][::-1]
    else:
        found = list((rows if before is None else rows.filter(pk__lt=before)).order_by("-pk")[: PAGE_SIZE + 1])
        newer, older, found = before is not None, len(found) > PAGE_SIZE, found[:PAGE_SIZE]
    return (
        found,
        _url(ctx, after=found[0].pk) if newer and found else _url(ctx) if newer else "",
        _url(ctx, before=found[-1].pk) if older and found else "",
    )


def _event(ctx: PageContext, row: HealthEvent, tenant: str) -> EventRow:
    return EventRow(
        title=row.title,
        kind=row.issue_type,
        tenant=tenant,
        urgent=row.urgent,
        opened_at=row.opened_at,
        closed_at=row.closed_at,
        lasted=_duration((row.closed_at or ctx.now) - row.opened_at),
    )


def _duration(time: timedelta) -> str:
    start = datetime(2000, 1, 1, tzinfo=UTC)
    return timesince(start, start + time, depth=1) if time >= timedelta(minutes=1) else "Under a minute"


def _alert(row: BudgetAlert, deliveries: tuple[BudgetDelivery, ...]) -> OperatorAlertsAlertRow:
    is_forecast = row.threshold == BudgetAlert.FORECAST
    return OperatorAlertsAlertRow(
        tenant=row.tenant.name,
        tenant_url=reverse("budgets", args=[row.tenant.slug]),
        budget=row.budget.name,
        threshold="Forecast" if is_forecast else f"{row.threshold}%",
        is_forecast=is_forecast,
        used=_amount(row.budget.unit, row.used if row.forecast is None else row.forecast),
        limit=_amount(row.budget.unit, row.limit),
        part=share(row.used, row.limit),
        at=row.created_at,
        period_start=row.budget_period.period_start,
        deliveries=deliveries,
    )


def _amount(unit: str, amount: int) -> str:
    if unit == BudgetPeriod.Unit.MONEY:
        return Money.nano(amount).text
    return f"{compact(amount) if amount >= 10**6 else exact(amount)} {unit}"


def _number(ctx: PageContext, name: str) -> int | None:
    text = ctx.query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _url(ctx: PageContext, **cursor: int) -> str:
    params = {name: value for name, value in ctx.query.items() if name not in ("before", "after")}
    return f"{ctx.url('operator-alerts')}?{urlencode(params | cursor)}"
